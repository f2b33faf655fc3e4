"""Allocations that were given back and do not go."""

from orchestrator.core import events as ev
from orchestrator.core.actions import GiveBack
from tests.unit.core.story import Story
from tests.unit.core.test_replace import gives, recovered, running


def given_back() -> Story:
    """A further request was not needed any more, and its end was asked for."""
    story = gives(recovered(running(), "n2"), "job-2")
    story.says(ev.JobObserved(job="job-2", state="queued", why="Priority"))
    story.joins("n2", incarnation="i2", job="job-1")
    return story.done(story.decides_one(), detail="job-2")


def test_one_that_is_still_there_a_while_later_is_given_back_again() -> None:
    story = given_back()
    assert story.later(119).decides() == []
    again = story.later(2).decides_one()
    assert again.action == GiveBack(job="job-2")
    assert "still there" in again.reason
    assert story.later(1000).decides() == [], "the first is not done with yet"
    story.done(again, detail="job-2")
    assert story.decides_one().action == GiveBack(job="job-2")


def test_one_that_is_gone_is_left_alone() -> None:
    story = given_back().says(ev.JobObserved(job="job-2", state="gone"))
    assert story.later(10_000).decides() == []
