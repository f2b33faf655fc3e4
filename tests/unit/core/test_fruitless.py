"""Requests for nodes that bring none: when they are repeated, and when the run gives up."""

from orchestrator.core import events as ev
from orchestrator.core.events import Ending
from orchestrator.core.rules.launch import MOST_FRUITLESS
from tests.unit.core.story import Story
from tests.unit.core.test_replace import launches, lost, recovered, running

HOUR_S = 3600.0


def refused(story: Story) -> Story:
    """All requests are refused, until no more are made for a while; the attempt goes on."""
    for _ in range(60):
        newest = story.state.allocations[-1]
        if not newest.job:
            story.says(ev.ActionDone(key=newest.key, ok=False, detail="partition is down"))
        story.later(10).decides()
    assert len(story.state.allocations) == 1 + MOST_FRUITLESS
    return story


def test_a_run_that_trains_asks_again_every_hour() -> None:
    story = refused(recovered(running(), "n2"))
    assert launches(story.later(HOUR_S / 2)) == []
    assert launches(story.later(HOUR_S / 2)) == [1]
    story.says(ev.ActionDone(key=story.state.allocations[-1].key, ok=False, detail="still"))
    assert launches(story.later(HOUR_S / 2)) == []
    assert launches(story.later(HOUR_S / 2 + 1)) == [1]
    assert not story.state.outcome


def test_spares_that_never_came_do_not_end_a_run_that_trained_without_them() -> None:
    story = refused(recovered(running(), "n2"))
    lost(story, "n1", "n3")
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.FAILED)).decides()
    assert story.state.allocations[-1].nodes == 3
    assert not story.state.outcome
