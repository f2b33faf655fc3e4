"""The governor of the checkpoint interval."""

import math

from orchestrator.core import events as ev
from orchestrator.core.actions import SetInterval
from tests.unit.core.story import Story, policy

TUNED = policy(tune_interval=True)


def measured(stall_s: float = 0.5) -> Story:
    story = Story(policy=TUNED).running(step=10)
    story.steps(11, step_s=0.5, stall_s=stall_s, saves=1)
    story.uploads(10)
    commit = next(d for d in story.decides() if d.rule == "commit")
    return story.commits(10).done(commit)


def test_the_interval_follows_what_was_measured() -> None:
    story = measured()
    decision = story.decides_one()
    action = decision.action
    assert isinstance(action, SetInterval)
    assert action.previous_steps == 10
    assert action.interval_steps != 10
    assert action.effective_step == 11 + 2
    assert action.inputs["upload_s"] == 2.0
    assert action.inputs["stall_s"] == 0.5
    assert math.isfinite(action.goodput)
    assert story.state.interval_steps == action.interval_steps


def test_the_interval_moves_once_per_new_commit() -> None:
    story = measured()
    story.done(story.decides_one())
    assert story.decides() == []
    story.steps(21).uploads(20)
    commit = story.decides_one()
    story.commits(20).done(commit)
    assert isinstance(story.decides_one().action, SetInterval)


def test_the_interval_waits_for_the_answer_to_its_last_move() -> None:
    story = measured()
    story.decides_one()
    story.steps(21).uploads(20)
    commit = story.decides_one()
    assert story.commits(20).done(commit).decides() == []


def test_an_answer_that_was_lost_with_its_attempt_holds_up_nothing() -> None:
    story = measured()
    story.decides_one()
    story.fails()
    story.starts()
    story.steps(21).uploads(20, attempt=2)
    commit = story.decides_one()
    story.commits(20, attempt=2).done(commit)
    assert isinstance(story.decides_one().action, SetInterval)


def test_nothing_moves_before_everything_was_measured() -> None:
    story = Story(policy=TUNED).running(step=10).commits(10)
    assert story.decides() == []


def test_nothing_moves_when_tuning_is_off() -> None:
    story = Story(policy=policy(tune_interval=False)).running(step=10)
    story.steps(11, stall_s=0.5, saves=1).uploads(10)
    commit = story.decides_one()
    assert story.commits(10).done(commit).decides() == []


def test_nothing_moves_before_the_first_step_of_an_attempt() -> None:
    story = measured().fails()
    story.starts()
    assert story.decides() == []


def test_the_next_attempt_starts_with_the_interval_in_force() -> None:
    story = measured()
    story.done(story.decides_one())
    story.fails()
    start = story.starts()
    assert getattr(start.action, "interval_steps", None) == story.state.interval_steps != 10


def test_costs_without_a_limit_go_through_the_journal() -> None:
    story = measured()
    story.says(ev.PolicySet(policy=policy(tune_interval=True, max_lost_work_s=math.inf)))
    action = story.decides_one().action
    assert isinstance(action, SetInterval)
    assert action.inputs["max_lost_work_s"] == math.inf
