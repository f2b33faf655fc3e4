"""Runs that lose nodes while their store cannot be reached: copies elsewhere serve."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from checkpointing.content import content_sha256
from checkpointing.store.base import StoreConfig, open_store
from deploy.demo.run import Run
from orchestrator.core.actions import Outcome, Restore, Source
from orchestrator.core.events import DISK, PEER
from orchestrator.core.restore import on_nodes
from orchestrator.core.state import State
from orchestrator.views.replay import replay
from tests.integration.conftest import MakeRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

STEPS, STEP_S, WORLD, SIZE = 400, 0.05, 4, 4096
JOB = Path(__file__).parents[1] / "data" / "adding_job.py"


def expected() -> NDArray[np.float64]:
    """What the job's weights are after all steps, however often it was broken."""
    own = [np.zeros(SIZE) for _ in range(WORLD)]
    weights, momentum = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(STEPS):
        for rank in range(WORLD):
            own[rank] += np.random.default_rng((step, rank, WORLD)).standard_normal(SIZE)
        total = own[0].copy()
        for vector in own[1:]:
            total += vector
        momentum *= 0.9
        momentum += total / WORLD - 0.1 * weights
        weights += 0.01 * momentum
    return weights


class Tiered:
    """A run with a store that can be taken away and given back."""

    def __init__(
        self, make_run: MakeRun, folder: Path, tiers: str, spares: int, step_s: float = 60.0
    ) -> None:
        self.store, self.gate = folder / "store", folder / "gate"
        command = ["python", str(JOB), str(STEPS), str(STEP_S), str(self.gate)]
        self.run: Run = make_run(
            "tiers",
            command,
            spares=spares,
            step_s=step_s,
            store=self.store,
            workdir=folder,
            job='preload = ["numpy"]',
            checkpoint=f"memory_interval_steps = 5\n{tiers}",
        )

    def until_copied(self, tier: str) -> Restore:
        """Train until copies hold what the store has not; return what could be restored then."""
        self.run.start()
        self.run.wait("a checkpoint", lambda state: bool(state.commits))
        self.store.rename(self.away)
        self.run.wait("newer copies", lambda state: self._copied(state, tier))
        state = self.run.state
        assert state.attempt is not None
        return max(on_nodes(state, state.attempt.nodes), key=lambda c: c.step)

    @staticmethod
    def _copied(state: State, tier: str) -> bool:
        held = [c for n in state.nodes.values() for c in n.replicas if c.tier == tier]
        newest = {
            rank: max((c.step for c in held if c.rank == rank), default=0) for rank in range(4)
        }
        return min(newest.values()) > state.commits[0][0]

    @property
    def away(self) -> Path:
        return self.store.with_name("away")

    def recovers(self, reached: Callable[[State], bool]) -> None:
        """Wait for a step of a later attempt, then give the store back and let the run end."""
        self.run.wait("the next attempt", reached)
        self.away.rename(self.store)
        self.gate.touch()
        self.run.join()
        assert self.run.state.outcome is Outcome.FINISHED
        assert not replay(self.run.records).differences
        found = content_sha256(
            open_store(StoreConfig(url=f"file://{self.store}")), self.run.name, STEPS
        )
        head = json.dumps(["model/weights", "float64", [SIZE]]).encode()
        assert found["weights"] == hashlib.sha256(head + expected().tobytes()).hexdigest()


def goes_on(state: State) -> bool:
    attempt = state.attempt
    return attempt is not None and attempt.number > 1 and attempt.first_step_at is not None


def test_a_replaced_node_restores_from_its_buddy_and_needs_no_store(
    make_run: MakeRun, tmp_path: Path
) -> None:
    tiered = Tiered(make_run, tmp_path, "peer_interval_steps = 5", spares=1)
    before = tiered.until_copied(PEER)
    assert tiered.run.state.attempt is not None
    first, second = tiered.run.state.attempt.nodes
    tiered.run.kill_node(second)
    tiered.recovers(goes_on)
    (incident,) = tiered.run.state.incidents
    assert (incident.fault, incident.node) == ("node_lost", second)
    restore = incident.restore
    assert restore is not None
    assert restore.source is Source.PEER
    assert restore.step >= before.step - 5
    assert {(fetch.rank, fetch.nodes) for fetch in restore.fetches} >= {
        (2, (first,)),
        (3, (first,)),
    }


@pytest.mark.chaos
def test_a_run_outlasts_a_store_that_is_away_longer_than_its_ranks_wait(
    make_run: MakeRun, tmp_path: Path
) -> None:
    tiered = Tiered(make_run, tmp_path, "", spares=0, step_s=1.0)  # they wait for 5 s
    run = tiered.run
    run.start()
    run.wait("two checkpoints", lambda state: len(state.commits) > 1)
    assert run.state.attempt is not None
    newest = run.state.commits[0][0]
    for node in run.state.attempt.nodes:
        run.kill_node(node)
    tiered.store.rename(tiered.away)
    tiered.recovers(lambda state: state.waiting_for.startswith("waiting for the store: "))
    assert run.state.quarantined == frozenset()
    away = [i for i in run.state.incidents if i.fault == "store_away"]
    assert {(i.fault_class, i.node) for i in away} == {("storage", None)}
    restore = away[-1].restore
    assert restore is not None
    assert restore.source is Source.STORE
    assert restore.step >= newest


@pytest.mark.chaos
def test_ranks_wait_for_a_store_that_is_away_while_they_restore(
    make_run: MakeRun, tmp_path: Path
) -> None:
    tiered = Tiered(make_run, tmp_path, "", spares=0)
    run = tiered.run
    run.start()
    run.wait("two checkpoints", lambda state: len(state.commits) > 1)
    assert run.state.attempt is not None
    for node in run.state.attempt.nodes:
        run.kill_node(node)
    tiered.store.rename(tiered.away)
    logs = run.config.run_dir / "logs" / "attempt-0002"
    tiered.recovers(
        lambda _: any("the store is away" in log.read_text() for log in logs.glob("rank-*.log"))
    )
    assert run.state.quarantined == frozenset()
    restores = [incident.restore for incident in run.state.incidents]
    assert [restore.source for restore in restores if restore] == [Source.STORE] * len(restores)
    assert len(restores) == 1


def test_a_run_that_lost_all_its_nodes_restores_from_their_disks(
    make_run: MakeRun, tmp_path: Path
) -> None:
    tiers = f'disk_dir = "{tmp_path / "disk"}"\ndisk_interval_steps = 10'
    tiered = Tiered(make_run, tmp_path, tiers, spares=0)
    tiered.until_copied(DISK)
    newest = tiered.run.state.commits[0][0]
    assert tiered.run.state.attempt is not None
    for node in tiered.run.state.attempt.nodes:
        tiered.run.kill_node(node)
    tiered.recovers(goes_on)
    restore = tiered.run.state.incidents[-1].restore
    assert restore is not None
    assert restore.source is Source.DISK
    assert restore.step > newest
    assert restore.step % 10 == 0
