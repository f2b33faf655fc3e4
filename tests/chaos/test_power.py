"""Power goes: of a worker, of the batch host, of a spare, at the worst of moments."""

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.core import events as ev
from orchestrator.core.actions import Source
from tests.chaos.conftest import MakeStory


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
    story.begin()
    batch_host, worker = story.nodes
    assert cluster.slurm("squeue", "-h", "-t", "R", "-o", "%B").split() == [batch_host]
    spare = story.spare
    cluster.do("power-off", batch_host)
    story.goes_on(2)
    assert story.nodes == (spare, worker)
    (incident,) = story.finish()
    assert (incident.fault, incident.node) == ("node_lost", batch_host)
    assert story.sums() == undisturbed
