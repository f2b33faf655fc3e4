"""Allocations that Slurm holds after a failed launch."""

import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import Finish, GiveBack, Outcome
from orchestrator.core.node import AllocationPhase
from tests.unit.core.story import Story
from tests.unit.core.test_replace import REPLACING, gives, launches, lost, recovered, running


def test_an_allocation_that_is_held_too_often_counts_as_one_that_brought_nothing() -> None:
    story = gives(recovered(running(), "n2"), "job-2")
    for _ in range(3):
        story.later(16).says(ev.JobObserved(job="job-2", state="held", why="launch failed"))
        story.done(story.decides_one())
        story.says(ev.JobObserved(job="job-2", state="queued", why="Priority"))
    story.later(16).says(ev.JobObserved(job="job-2", state="held", why="launch failed"))
    assert story.decides_one().action == GiveBack(job="job-2")
    assert launches(story.later(14)) == []
    assert launches(story.later(2)) == [1]


def test_one_held_allocation_on_its_way_out_does_not_hide_another() -> None:
    story = gives(recovered(running(nodes=3), "n2"), "job-2")
    story.later(16).says(ev.JobObserved(job="job-2", state="held", why="launch failed"))
    for _ in range(3):
        story.done(story.decides_one())
        story.says(ev.JobObserved(job="job-2", state="queued", why="Priority"))
        story.later(16).says(ev.JobObserved(job="job-2", state="held", why="launch failed"))
    assert GiveBack(job="job-2") in [d.action for d in story.decides()]
    assert launches(story.later(1000)) == [1]
    gives(story, "job-3").says(ev.JobObserved(job="job-3", state="held", why="launch failed"))
    assert [d.rule for d in story.decides()] == ["unhold"]


@pytest.mark.parametrize("unheld", [0, 1, 2])
def test_a_held_allocation_is_let_go_a_few_times(unheld: int) -> None:
    held = ev.JobObserved(job="job-1", state="held", why="launch failed requeued held")
    story = Story(policy=REPLACING).launched()
    for _ in range(unheld):
        story.later(16).says(held)
        decision = story.decides()[0]
        story.done(decision).says(ev.JobObserved(job="job-1", state="queued", why="Priority"))
    decision = story.later(16).says(held).decides()[0]
    assert decision.rule == "unhold"
    assert "launch failed" in decision.reason


def test_an_allocation_that_is_held_again_and_again_ends_the_run() -> None:
    held = ev.JobObserved(job="job-1", state="held", why="launch failed requeued held")
    story = Story(policy=REPLACING).launched()
    for _ in range(3):
        story.done(story.later(16).says(held).decides()[0])
        story.says(ev.JobObserved(job="job-1", state="queued", why="Priority"))
    decision = story.later(16).says(held).decides()[0]
    assert decision.action == Finish(outcome=Outcome.FAILED)
    assert "3 failed launches" in decision.reason


def test_a_further_request_that_is_held_too_often_does_not_end_the_run() -> None:
    story = gives(lost(running(spares=0), "n2"), "job-1")
    story.decides()
    gives(story, "job-2")
    for _ in range(3):
        story.later(16).says(ev.JobObserved(job="job-2", state="held", why="launch failed"))
        story.done(next(d for d in story.decides() if d.rule == "unhold"))
        story.says(ev.JobObserved(job="job-2", state="queued", why="Priority"))
    story.later(16).says(ev.JobObserved(job="job-2", state="held", why="launch failed"))
    assert GiveBack(job="job-2") in [d.action for d in story.decides()]
    assert launches(story.later(16)) == [1]


def test_a_job_that_is_let_go_is_not_let_go_again_before_it_is_seen_to_be_held_again() -> None:
    held = ev.JobObserved(job="job-1", state="held", why="launch failed requeued held")
    story = Story(policy=REPLACING).launched()
    story.done(next(d for d in story.says(held).decides() if d.rule == "unhold"))
    assert [d.rule for d in story.decides()] == ["no_capacity"]
    assert story.state.allocations[0].phase is AllocationPhase.QUEUED
    assert not [d for d in story.says(held).decides() if d.rule == "unhold"]
    assert next(d.rule for d in story.later(16).decides()) == "unhold"
