"""A MoE run that is broken ends in the same bits as one that is left alone."""

from pathlib import Path

import pytest

from checkpointing.content import content_sha256
from checkpointing.store.base import StoreConfig, open_store
from deploy.demo.processes import is_alive
from deploy.demo.run import Run
from orchestrator.core.actions import Outcome
from orchestrator.core.state import State
from orchestrator.views.replay import replay
from tests.integration.conftest import MakeRun

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 300
COMMAND = ["python", "-m", "jobs.moe", "--preset", "tiny", "--steps", str(STEPS), "--plain"]


@pytest.fixture(scope="module")
def undisturbed(
    make_module_run: MakeRun, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The sums of a run that nothing happened to."""
    store = tmp_path_factory.mktemp("store")
    run = make_module_run("undisturbed", COMMAND, store=store)
    run.start()
    run.join()
    assert run.state.outcome is Outcome.FINISHED
    assert not run.state.incidents
    return sums(run, store)


def sums(run: Run, store: Path) -> dict[str, str]:
    """Return the SHA-256 sums of the final committed checkpoint."""
    return content_sha256(open_store(StoreConfig(url=f"file://{store}")), run.name, STEPS)


def saved_and_stepping(state: State) -> bool:
    """Whether there is something to fall back to and something to lose."""
    return bool(state.commits) and state.best_step >= 30


def placement(state: State) -> tuple[str, ...]:
    """Return the nodes of the newest attempt in rank order."""
    assert state.attempt is not None
    return state.attempt.nodes


def finish(run: Run) -> None:
    """Let the run end, and check what every journal must hold."""
    run.join()
    assert run.state.outcome is Outcome.FINISHED
    assert not replay(run.records).differences
    assert not any(is_alive(pid) for pid in run.rank_pids().values())


def test_a_killed_rank_is_restarted_in_place_and_changes_no_bit(
    make_run: MakeRun, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    run = make_run("rank", COMMAND, store=tmp_path / "store")
    run.start()
    run.wait("a checkpoint", saved_and_stepping)
    second = placement(run.state)[1]
    run.kill_rank(2)
    finish(run)
    (incident,) = run.state.incidents
    assert (incident.fault, incident.rank, incident.node) == ("rank_killed", 2, second)
    assert incident.rule == "restart_in_place"
    assert incident.restore is not None
    assert sums(run, tmp_path / "store") == undisturbed


def test_a_lost_node_is_replaced_by_the_spare_and_changes_no_bit(
    make_run: MakeRun, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    run = make_run("node", COMMAND, store=tmp_path / "store")
    run.start()
    run.wait("a checkpoint", saved_and_stepping)
    first, second = placement(run.state)
    (spare,) = {"node0", "node1", "node2"} - {first, second}
    run.kill_node(first)
    finish(run)
    (incident,) = run.state.incidents
    assert (incident.fault, incident.node) == ("node_lost", first)
    assert incident.rule == "spare_takes_over"
    assert placement(run.state) == (spare, second)
    assert sums(run, tmp_path / "store") == undisturbed


def test_a_killed_supervisor_is_replaced_without_touching_a_rank(
    make_run: MakeRun, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    run = make_run("supervisor", COMMAND, store=tmp_path / "store")
    run.start()
    run.wait("a checkpoint", saved_and_stepping)
    pids = run.rank_pids()
    run.kill_supervisor()
    run.start()
    run.wait("the next supervisor", lambda state: state.epoch == 2)
    finish(run)
    assert not run.state.incidents
    assert run.rank_pids() == pids
    assert sums(run, tmp_path / "store") == undisturbed


def test_everything_is_killed_and_the_run_still_ends_in_the_same_bits(
    make_run: MakeRun, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    run = make_run("all", COMMAND, store=tmp_path / "store")
    run.start()
    run.wait("a checkpoint", saved_and_stepping)
    run.kill_supervisor()
    run.kill_node(placement(run.state)[1])
    run.kill_rank(0)
    run.start()
    finish(run)
    assert sums(run, tmp_path / "store") == undisturbed
