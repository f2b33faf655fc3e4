"""The governor of the checkpoint interval."""

import math

from orchestrator.core import events as ev
from orchestrator.core.actions import SetInterval
from tests.unit.core.story import Story, policy

TUNED = policy(tune_interval=True)


def saved(story: Story, *steps: int) -> Story:
    """Each step is saved, uploaded and committed; what is decided then is left to the test."""
    number = story.attempt.number
    for step in steps:
        story.steps(step, step_s=0.5, stall_s=0.5, saves=story.state.saves + 1)
        story.uploads(step, attempt=number)
        commit = story.next()
        assert commit is not None
        story.says(ev.DecisionMade(decision=commit)).commits(step, attempt=number).done(commit)
    return story


def measured() -> Story:
    return saved(Story(policy=TUNED).running(step=1), 10, 20)


def test_the_interval_follows_what_was_measured() -> None:
    story = measured()
    decision = story.decides_one()
    action = decision.action
    assert isinstance(action, SetInterval)
    assert action.previous_steps == 10
    assert action.interval_steps != 10
    assert action.effective_step == 20 + 2
    assert action.inputs["upload_s"] == 2.0
    assert action.inputs["stall_s"] == 0.5
    assert type(action.binding) is str
    assert math.isfinite(action.goodput)
    assert story.state.interval_steps == action.interval_steps


def test_saves_in_memory_are_among_what_was_measured() -> None:
    tuned = policy(tune_interval=True, memory_interval_steps=4)
    action = saved(Story(policy=tuned).running(step=1), 10, 20).decides_one().action
    assert isinstance(action, SetInterval)
    assert action.inputs["memory_steps"] == 4.0
    before = measured().decides_one().action
    assert isinstance(before, SetInterval)
    assert "memory_steps" not in before.inputs
    assert action.goodput < before.goodput


def test_one_commit_is_not_enough_to_move() -> None:
    assert saved(Story(policy=TUNED).running(step=1), 10).decides() == []


def test_the_interval_moves_again_only_after_two_new_commits() -> None:
    story = measured()
    story.done(story.decides_one())
    assert story.decides() == []
    assert saved(story, 30).decides() == []
    assert isinstance(saved(story, 40).decides_one().action, SetInterval)


def test_the_interval_waits_for_the_answer_to_its_last_move() -> None:
    story = measured()
    story.decides_one()
    assert saved(story, 30, 40).decides() == []


def test_an_answer_that_was_lost_with_its_attempt_holds_up_nothing() -> None:
    story = measured()
    story.decides_one()
    story.fails()
    story.starts()
    assert isinstance(saved(story, 30, 40).decides_one().action, SetInterval)


def test_nothing_moves_before_everything_was_measured() -> None:
    story = Story(policy=TUNED).running(step=10).commits(10).commits(20)
    assert story.decides() == []


def test_nothing_moves_when_tuning_is_off() -> None:
    story = saved(Story(policy=policy(tune_interval=False)).running(step=1), 10, 20)
    assert story.decides() == []


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
