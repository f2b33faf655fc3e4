"""A supervisor is killed at every append to its journal; the next one finishes the run.

The first run has no store, and every append of it is a place to die: before the batch is in the
file, and after. The second one saves; there each kind of append that the first run lacks is tried
where it comes first, and a commit also where it comes last: the saves between make the same row of
appends again. `make chaos` tries all of these places, `make test` each kind of place once.
"""

import itertools
import json
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpointing.content import content_sha256
from checkpointing.resolver import list_commits
from checkpointing.store.base import StoreConfig, open_store
from deploy.demo.processes import end_run
from orchestrator.config import RunConfig, load
from orchestrator.core.actions import Outcome
from orchestrator.supervisor.journal import read_records, state_of
from orchestrator.views.replay import replay
from tests.integration.command_line import everstep, python
from tests.integration.traces import traces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOBS = Path(__file__).parents[1] / "data"
AT_ONCE = 3  # they mostly wait, for one another and for the disk
STEPS = 10
NODES = 2
EVERY = pytest.mark.parametrize(
    "every",
    [pytest.param(True, marks=pytest.mark.chaos, id="every"), pytest.param(False, id="kinds")],
)

TOML = """\
[run]
name = "{name}"

[job]
command = {command}
preload = []
workdir = "{jobs}"

[nodes]
count = {nodes}

[checkpoint]
{store}
interval_steps = 4
tune = false

[timeouts]
heartbeat_s = 0.2
kill_grace_s = 2.0
"""
SLEEPS = ["python", "short_job.py", "0.8"]
SAVES = ["python", "short_saving_job.py", str(STEPS), "0.08"]


def write(folder: Path, name: str, command: list[str], store: Path | None = None) -> Path:
    """Write a run file."""
    folder.mkdir(parents=True)
    path = folder / "run.toml"
    if store is not None:
        store.mkdir()
    text = TOML.format(
        name=name,
        command=json.dumps(command),
        jobs=JOBS,
        nodes=NODES,
        store=f'store = "{store.as_uri()}"' if store else "",
    )
    path.write_text(text)
    return path


def appends_of(toml: Path) -> list[list[str]]:
    """Let a run live, and return the names of the events of each of its appends."""
    done = python("-m", "tests.integration.crashing_supervisor", toml, "0", "after")
    assert done.returncode == 0, done.stderr
    appends: list[list[str]] = json.loads(done.stdout)
    return appends


def dies_and_is_replaced(toml: Path, deadly: int, when: str) -> str:
    """Kill the supervisor at one append, start the next; return how the first one ended."""
    crashing = "tests.integration.crashing_supervisor"
    first = python("-m", crashing, toml, str(deadly), when)
    if first.returncode == 0:
        return "lived"  # this time the run took fewer appends
    assert first.returncode == -signal.SIGKILL, first.stderr
    journal = load(toml).run_dir / "journal.jsonl"
    was_over = state_of(read_records(journal)).over
    second = everstep("run", toml, "--plain")
    assert second.returncode == (3 if was_over else 0), second.stdout + second.stderr
    return "killed"


def problems_of(config: RunConfig) -> Iterator[str]:
    """Look at everything that a finished run leaves; yield what is wrong with it."""
    records = read_records(config.run_dir / "journal.jsonl")
    state = state_of(records)
    if not state.over or state.outcome is not Outcome.FINISHED:
        yield f"outcome {state.outcome}: {state.outcome_reason}"
    if differences := replay(records).differences:
        yield f"replay: {differences}"
    if [record.seq for record in records] != list(range(1, len(records) + 1)):
        yield "the journal has gaps or repetitions"
    lines = (config.run_dir / "output" / "notes").read_text().splitlines()
    notes = sorted(line.split()[:3] for line in lines)
    wanted = sorted([word, "1", str(rank)] for word in ("start", "end") for rank in range(NODES))
    if notes != wanted:
        yield f"not one start and one end per rank: {notes}"
    submitted = sorted(path.name for path in (config.run_dir / "submitit").rglob("*_submitted.pkl"))
    if len(submitted) != 1:
        yield f"not one allocation: {submitted}"
    if left := traces(config):
        yield f"left behind: {left}"


def try_each(
    folder: Path, points: Iterable[tuple[int, str]], command: list[str], sums: dict[int, str]
) -> list[str]:
    """Try each place to die, some at a time; return what went wrong where.

    Args:
        sums: What the committed checkpoints must hold, by step; empty for a run without a store.
    """

    def one(point: tuple[int, str]) -> list[str]:
        deadly, when = point
        place = folder / f"{deadly}-{when}"
        store = place.with_name(f"{place.name}-store") if sums else None
        toml = write(place, f"{when}-{deadly}", command, store)
        config = load(toml)
        try:
            dies_and_is_replaced(toml, deadly, when)
            problems = list(problems_of(config))
        except Exception as error:  # noqa: BLE001 - the other places to die go on
            tail = read_records(config.run_dir / "journal.jsonl")[-3:]
            problems = [f"{type(error).__name__}: {error}; the journal's end: {tail}"]
        finally:
            end_run(config, None)  # only what a failure has left
        if store is not None and (found := sums_of(config, store)) != sums:
            problems.append(f"committed: {found}, wanted: {sums}")
        return [f"{when} append {deadly}: {problem}" for problem in problems]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(itertools.chain.from_iterable(pool.map(one, points)))


def sums_of(config: RunConfig, folder: Path) -> dict[int, str]:
    """Read every committed checkpoint whole; return its sum by step."""
    store = open_store(StoreConfig(url=folder.as_uri()))
    name = config.run.name
    commits = list_commits(store, name)
    return {commit.step: content_sha256(store, name, commit.step)["all"] for commit in commits}


@EVERY
def test_the_supervisor_is_killed_at_every_append(tmp_path: Path, every: bool) -> None:
    toml = write(tmp_path / "reference", "reference", SLEEPS)
    appends = appends_of(toml)
    assert not list(problems_of(load(toml)))
    numbers = range(1, len(appends) + 1) if every else first_of_each_kind(appends)
    points = places(appends, numbers, every=every)
    assert not try_each(tmp_path, points, SLEEPS, {})


@EVERY
def test_the_supervisor_is_killed_where_checkpoints_are_counted(
    tmp_path: Path, every: bool
) -> None:
    store = tmp_path / "reference-store"
    toml = write(tmp_path / "reference", "reference", SAVES, store)
    appends = appends_of(toml)
    config = load(toml)
    assert not list(problems_of(config))
    sums = sums_of(config, store)
    assert sorted(sums) == [4, 8, 10]
    points = places(appends, novel(appends), every=every)
    assert not try_each(tmp_path, points, SAVES, sums)


def places(
    appends: list[list[str]], numbers: Iterable[int], *, every: bool
) -> list[tuple[int, str]]:
    """Return the places to die around some appends.

    To die after one is to die before the next, but for what is done in between: what was decided.
    Without `every`, places after are those of decisions, and the one at the end.
    """
    return [
        (number, when)
        for number in numbers
        for when in ("before", "after")
        if every
        or when == "before"
        or number == len(appends)
        or appends[number - 1][0].startswith("decision ")
    ]


def first_of_each_kind(appends: list[list[str]]) -> list[int]:
    """Return the first append of each set of events that follows each kind of decision."""
    first: dict[tuple[str, frozenset[str]], int] = {}
    decision = ""
    for number, names in enumerate(appends, start=1):
        decision = next((name for name in names if name.startswith("decision ")), decision)
        first.setdefault((decision, frozenset(names)), number)
    return sorted(first.values())


def novel(appends: list[list[str]]) -> list[int]:
    """Return where each kind of event that only a run with a store has comes first or last."""
    kinds = ("CatalogueRead", "PhaseReached", "Progress", "Staged", "ShardUploaded")
    commits = ("decision Commit", "CheckpointCommitted")
    places: dict[str, list[int]] = {name: [] for name in (*kinds, *commits)}
    for number, names in enumerate(appends, start=1):
        for name in set(names) & set(places):
            places[name].append(number)
    return sorted({places[name][0] for name in places} | {places[name][-1] for name in commits})


def test_a_torn_append_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    points = [(1, "torn"), (3, "torn"), (9, "torn")]
    assert not try_each(tmp_path, points, SLEEPS, {})


def test_supervisors_that_die_again_and_again_finish_the_run(tmp_path: Path) -> None:
    toml = write(tmp_path / "run", "crash-loop", SLEEPS)
    journal = load(toml).run_dir / "journal.jsonl"
    try:
        for _ in range(30):
            # The first append takes the lease, two more may be agents that say hello again.
            dies = python("-m", "tests.integration.crashing_supervisor", toml, "4", "after")
            if dies.returncode == 0 or state_of(read_records(journal)).over:
                break
            assert dies.returncode == -signal.SIGKILL, dies.stderr
        assert not list(problems_of(load(toml)))
    finally:
        end_run(load(toml), None)
