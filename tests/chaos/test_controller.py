"""slurmctld is away: what runs goes on."""

import time

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.launch.slurm import LOOK_EVERY_S
from tests.chaos.conftest import MakeStory


@pytest.mark.brief
def test_training_does_not_notice_that_slurmctld_is_away(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell()
    story.begin()
    cluster.do("stop-slurmctld")
    until = time.monotonic() + 1.2 * LOOK_EVERY_S  # so that it is asked in vain
    while time.monotonic() < until:
        story.trains_on()
    cluster.do("start-slurmctld")
    story.trains_on()
    assert not story.finish()
    assert len(story.starts()) == 1
    assert story.sums() == undisturbed


def test_a_restart_needs_no_slurmctld(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell()
    story.begin()
    first, worker = story.nodes
    spare = story.spare
    cluster.do("stop-slurmctld")
    cluster.do("power-off", worker)
    story.goes_on(2)
    assert story.nodes == (first, spare)
    cluster.do("start-slurmctld")
    (incident,) = story.finish()
    assert (incident.fault, incident.node) == ("node_lost", worker)
    assert story.sums() == undisturbed
