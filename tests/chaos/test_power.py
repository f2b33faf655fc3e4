"""Power goes: of a worker, of the batch host, of a spare, at the worst of moments."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.core.actions import Source
from orchestrator.core.events import PEER
from orchestrator.core.state import State
from tests.chaos.conftest import MakeStory
from tests.chaos.story import INTERVAL, RANKS, Story, is_stepping, living
from tests.integration.devclusters import eventually


@pytest.mark.brief
def test_a_worker_without_power_is_replaced_by_the_spare(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell()
    story.begin()
    first, worker = story.nodes
    spare = story.spare
    cluster.do("power-off", worker)
    story.goes_on(2)
    assert story.nodes == (first, spare)
    (incident,) = story.finish()
    assert (incident.fault, incident.node) == ("node_lost", worker)
    assert incident.restore is not None, "it went on from a checkpoint"
    assert story.sums() == undisturbed


def test_the_ranks_of_a_node_without_power_restore_from_their_buddy_s_memory(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(checkpoint="memory_interval_steps = 5\npeer_interval_steps = 5")
    story.begin()
    first, worker = story.nodes
    away = story.store.with_name("away")
    story.store.rename(away)
    story.wait("copies that the store has not", has_newer_copies)
    cluster.do("power-off", worker)
    story.wait("the next attempt", lambda state: state.last_attempt == 2 and is_stepping(state))
    away.rename(story.store)
    story.trains_on()
    (incident,) = story.finish()
    assert (incident.fault, incident.node) == ("node_lost", worker)
    restore = incident.restore
    assert restore is not None
    assert restore.source is Source.PEER
    fetched = {(fetch.rank, fetch.nodes) for fetch in restore.fetches}
    assert fetched >= {(rank, (first,)) for rank in range(RANKS, 2 * RANKS)}
    assert story.sums() == undisturbed


def has_newer_copies(state: State) -> bool:
    """Whether every rank has a copy on another node that is newer than the store."""
    held = [c for node in state.nodes.values() for c in node.replicas if c.tier == PEER]
    newest = [max((c.step for c in held if c.rank == n), default=0) for n in range(2 * RANKS)]
    return min(newest) > state.commits[0][0]


def test_the_batch_host_may_lose_power_too(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell()
    story.begin(late="node3")
    batch_host, worker = story.nodes
    assert cluster.slurm("squeue", "-h", "-t", "R", "-o", "%B").split() == [batch_host]
    spare = story.spare
    cluster.do("power-off", batch_host)
    story.goes_on(2)
    assert story.nodes == (spare, worker)
    (incident,) = story.finish()
    assert (incident.fault, incident.node) == ("node_lost", batch_host)
    assert story.sums() == undisturbed


def test_a_spare_without_power_disturbs_nobody(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell()
    story.begin()
    spare = story.spare
    cluster.do("power-off", spare)
    story.wait("the loss of the spare", lambda state: spare not in living(state))
    story.trains_on()
    assert not story.finish()
    assert len(story.starts()) == 1
    assert story.sums() == undisturbed


def test_a_checkpoint_half_uploaded_is_never_taken_for_one(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell()
    story.begin()
    _first, worker = story.nodes
    half = freeze_uploader(story, worker)
    cluster.do("power-off", worker)
    story.goes_on(2)
    (incident,) = story.finish(lost_steps=3 * INTERVAL)
    assert incident.restore is not None
    assert incident.restore.step < half
    by = dict(story.state.commits)
    assert by.get(half, 2) == 2, "half of it came from a node that is dead"
    assert story.sums() == undisturbed


def freeze_uploader(story: Story, node: str) -> int:
    """Stop a node's uploader; return the step whose other half then is in the store."""
    before = story.state.best_step
    os.kill(story.uploader(node), signal.SIGSTOP)

    def half_there(state: State) -> list[int]:
        ours = [step for (step, _), shards in state.uploads.items() if len(shards) == RANKS]
        return [step for step in ours if step > before]

    story.soon("half a checkpoint", lambda state: bool(half_there(state)))
    return half_there(story.state)[0]


def test_power_goes_again_during_the_restart(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(spares=2)
    story.begin()
    first, worker = story.nodes
    cluster.do("power-off", worker)
    story.soon("the decision to restart", lambda state: state.last_attempt == 2)
    second = story.nodes[1]
    cluster.do("power-off", second)
    story.goes_on(3)
    assert story.nodes[0] == first
    assert story.nodes[1] not in (worker, second)
    incidents = story.finish()
    assert [i.fault for i in incidents] == ["node_lost", "node_lost"]
    assert [i.node for i in incidents] == [worker, second]
    assert story.sums() == undisturbed


@pytest.mark.parametrize("standby", [False, True], ids=["started again", "standing by"])
def test_the_supervisor_s_node_loses_power_and_another_takes_over(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str], standby: bool
) -> None:
    story = tell(slurm='exclude = "node4,node5"', host="auto")
    story.begin(on="node5")
    second = story.start_on("node4", "--standby") if standby else None
    if standby:
        told = "standing by"
        eventually("it stands by", lambda: told in story.log_path.read_text(encoding="utf-8"))
    data = story.store / story.name / "data"
    cluster.do("power-off", "node5")
    before = {path.name for path in data.iterdir()}
    story.soon("uploads go on", lambda _: len({p.name for p in data.iterdir()} - before) > 1)
    story.has_supervisor(second or story.start_on("node4"))
    story.wait("the next supervisor", lambda state: state.epoch == 2)
    story.trains_on()
    assert not story.finish()
    assert len(story.starts()) == 1, "no rank was touched"
    assert story.sums() == undisturbed


def power_off_at_once(cluster: Devcluster, *nodes: str) -> None:
    """Cut the power of all these nodes, as of a rack."""
    with ThreadPoolExecutor() as pool:
        for cut in [pool.submit(cluster.do, "power-off", node) for node in nodes]:
            cut.result()


def test_two_nodes_at_once_are_one_too_many_and_another_is_asked_for(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(nodes="")
    story.begin()
    both, spare = story.nodes, story.spare
    power_off_at_once(cluster, *both)
    story.goes_on(2)
    assert spare in story.nodes
    assert not set(story.nodes) & set(both)
    incidents = story.finish(jobs=2)
    assert incidents[0].node in both
    assert story.sums() == undisturbed


def test_two_nodes_at_once_shrink_a_run_that_may(tell: MakeStory, cluster: Devcluster) -> None:
    story = tell(nodes="replace = false\nmin_count = 1", words=("alike",))
    story.begin()
    both, spare = story.nodes, story.spare
    power_off_at_once(cluster, *both)
    story.goes_on(2)
    assert story.nodes == (spare,)
    assert story.finish()[0].node in both
