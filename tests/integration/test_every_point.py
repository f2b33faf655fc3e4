"""Agent, its companions and ranks are killed at every point of a whole run; its bits stay.

The points are those that a run came to which nothing happened to. A kind of point that comes again
and again is tried where it comes first and where it comes for the second time.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpointing.content import content_sha256
from checkpointing.resolver import list_commits
from checkpointing.store.base import StoreConfig, open_store
from deploy.demo.run import Run
from orchestrator.core.actions import Outcome
from orchestrator.core.events import CheckpointCommitted
from orchestrator.views.replay import replay
from tests.integration.conftest import MakeRun
from tests.integration.dying_processes import Death, environment, has_died, points_of
from tests.integration.traces import traces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOB = Path(__file__).parents[1] / "data" / "adding_job.py"
STEPS, STEP_S, WORLD, AT_ONCE, PARTS = 30, 0.03, 2, 3, 8
TIMES = 2
CHECKPOINT = "memory_interval_steps = 5\npeer_interval_steps = 5"
Try = Callable[[str, Death | None], Run]


@dataclass(frozen=True)
class Undisturbed:
    """What a run that nothing happens to comes to, and ends in."""

    points: dict[str, int]
    sums: dict[str, str]


@pytest.fixture(scope="module")
def run_to_its_end(make_module_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Try:
    folder = tmp_path_factory.mktemp("points")

    def run_to_its_end(name: str, death: Death | None) -> Run:
        noted = environment(folder / name, death)
        run = make_module_run(
            name,
            ["python", str(JOB), str(STEPS), str(STEP_S), str(folder / "no-gate")],
            ranks=1,
            store=folder / f"{name}-store",
            workdir=folder / name,
            job='preload = ["numpy"]',
            checkpoint=CHECKPOINT,
            env=noted,
        )
        run.start()
        run.join()
        return run

    return run_to_its_end


def notes_of(run: Run) -> Path:
    """Return the folder where its processes note their points."""
    return Path(run.config.job.workdir)


@pytest.fixture(scope="module")
def undisturbed(run_to_its_end: Try) -> Undisturbed:
    run = run_to_its_end("undisturbed", None)
    assert not list(problems_of(run))
    assert not run.state.incidents
    return Undisturbed(points=points_of(notes_of(run)), sums=sums_of(run))


def sums_of(run: Run) -> dict[str, str]:
    """Return the SHA-256 sums of the last committed checkpoint."""
    return content_sha256(
        open_store(StoreConfig(url=str(run.config.checkpoint.store))), run.name, STEPS
    )


def problems_of(run: Run) -> list[str]:
    """Look at everything that a finished run leaves; return what is wrong with it."""
    problems = []
    if run.state.outcome is not Outcome.FINISHED:
        problems.append(f"outcome {run.state.outcome}: {run.state.outcome_reason}")
    if differences := replay(run.records).differences:
        problems.append(f"replay: {differences}")
    said = {r.event.step for r in run.records if isinstance(r.event, CheckpointCommitted)}
    store = open_store(StoreConfig(url=str(run.config.checkpoint.store)))
    if lost := said - {commit.step for commit in list_commits(store, run.name)}:
        problems.append(f"committed and lost: {lost}")
    if left := traces(run.config):
        problems.append(f"left behind: {left}")
    return problems


def try_each(
    name: str, deaths: Sequence[Death], run_to_its_end: Try, wanted: dict[str, str]
) -> list[str]:
    """Try each death, some at a time, in runs of this name; return what went wrong where."""
    lived: list[str] = []

    def one(numbered: tuple[int, Death]) -> list[str]:
        number, death = numbered
        try:
            run = run_to_its_end(f"{name}-{number}", death)
            problems = problems_of(run)
            if (found := sums_of(run)) != wanted:
                problems.append(f"sums: {found}")
            if not has_died(notes_of(run)):
                lived.append(death.label)
        except Exception as error:  # noqa: BLE001 - the other points go on
            problems = [f"{type(error).__name__}: {error}"]
        return [f"{death.label}: {problem}" for problem in problems]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [problem for each in pool.map(one, enumerate(deaths)) for problem in each]
    print(f"{len(deaths)} deaths, {len(lived)} did not come to their points: {lived}")
    if len(lived) > len(deaths) // 4:
        found.append(f"did not come to their points: {lived}")
    return found


def deaths_of(victim: str, points: dict[str, int]) -> list[Death]:
    """Enumerate the deaths of one kind of process."""
    ofrank = ("phase", "arena")
    mine = [p for p in sorted(points) if p.startswith(ofrank) == (victim == "trainer")]
    if victim in ("uploader", "replicas"):
        mine = [p for p in mine if p.startswith((f"hear {victim}", "keep", "receive Order"))]
    deaths = []
    for point in mine:
        times = points[point] if point.startswith("arena") else min(points[point], TIMES)
        for n in range(1, times + 1):
            whens = ["before", "inside", "after"] if victim == "trainer" else ["before", "after"]
            if point == "arena begin":
                whens.remove("inside")
            deaths += [Death(victim, point, n, w, len(deaths) % WORLD) for w in whens]
    return deaths


def test_some_points(run_to_its_end: Try, undisturbed: Undisturbed) -> None:
    some = [
        Death("agent", "receive Order StartNode", 1, "after"),
        Death("trainer", "phase checkpoint", 1, "inside", rank=1),
    ]
    assert not try_each("some", some, run_to_its_end, undisturbed.sums)


@pytest.mark.chaos
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("victim", ["agent", "uploader", "replicas", "trainer"])
def test_every_point(run_to_its_end: Try, undisturbed: Undisturbed, victim: str, part: int) -> None:
    mine = deaths_of(victim, undisturbed.points)[part::PARTS]
    assert not try_each(f"{victim}-{part}", mine, run_to_its_end, undisturbed.sums)
