"""Power goes: of a worker, of the batch host, of a spare, at the worst of moments."""

import os
import signal

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.core.state import State
from tests.chaos.conftest import MakeStory
from tests.chaos.story import INTERVAL, RANKS, Story, living


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


def test_the_supervisor_s_node_loses_power_and_another_takes_over(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(slurm='exclude = "node4,node5"')
    story.begin(on="node5")
    data = story.store / story.name / "data"
    cluster.do("power-off", "node5")
    story.forget_supervisor()
    before = {path.name for path in data.iterdir()}
    story.soon("uploads go on", lambda _: len({p.name for p in data.iterdir()} - before) > 1)
    story.start_on("node4")
    story.wait("the next supervisor", lambda state: state.epoch == 2)
    story.trains_on()
    assert not story.finish()
    assert len(story.starts()) == 1, "no rank was touched"
    assert story.sums() == undisturbed


def test_two_nodes_at_once_are_one_too_many_and_another_is_asked_for(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(nodes="")
    story.begin()
    both, spare = story.nodes, story.spare
    for node in both:
        cluster.do("power-off", node)
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
    for node in both:
        cluster.do("power-off", node)
    story.goes_on(2)
    assert story.nodes == (spare,)
    assert story.finish()[0].node in both
