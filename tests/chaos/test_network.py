"""A node that lives on but is cut off, and comes back with an old attempt in its hands."""

import os
import signal

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.core import events as ev
from tests.chaos.conftest import MakeStory
from tests.chaos.story import INTERVAL, RANKS, Story, living
from tests.chaos.test_power import freeze_uploader


@pytest.mark.brief
def test_a_node_that_was_cut_off_ends_its_old_ranks_and_comes_back_as_a_spare(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell()
    story.begin()
    first, cut = story.nodes
    spare = story.spare
    uploader = story.uploader(cut)
    half = freeze_uploader(story, cut)
    cluster.do("partition", cut)
    story.goes_on(2)
    assert story.nodes == (first, spare)
    assert len(story.living_ranks(cut, 1)) == RANKS, "nobody could tell them"
    os.kill(uploader, signal.SIGCONT)
    late = story.store / story.name / f"data/step-{half:012d}/attempt-0001"
    story.soon("the late upload", lambda _: len([*late.glob("*.json")]) == 2 * RANKS)
    cluster.do("heal", cut)
    story.wait("it is back", lambda state: cut in living(state))
    story.mark("it is back")
    assert story.state.nodes[cut].lost_why == ""
    assert not story.living_ranks(cut, 1)
    story.trains_on()
    (incident,) = story.finish(lost_steps=3 * INTERVAL)
    assert (incident.fault, incident.node) == ("node_lost", cut)
    assert set(late_commits(story, cut)) <= {half}, "only what it made whole late, if even that"
    assert story.sums() == undisturbed


def late_commits(story: Story, node: str) -> list[int]:
    """Return the steps of the first attempt that were committed after the node's loss."""
    (lost,) = [r.seq for r, e in story.events(ev.AgentLost) if getattr(e, "node", "") == node]
    return [
        event.step
        for record, event in story.events(ev.CheckpointCommitted)
        if isinstance(event, ev.CheckpointCommitted) and event.attempt == 1 and record.seq > lost
    ]
