"""When a checkpoint is committed."""

from orchestrator.core import events as ev
from orchestrator.core.actions import Commit, Decision
from tests.unit.core.story import Story


def committed(decision: Decision) -> tuple[int, int]:
    assert isinstance(decision.action, Commit)
    return decision.action.step, decision.action.attempt


def test_nothing_is_committed_while_a_shard_is_missing() -> None:
    assert Story().running(step=10).uploads(10, 0, 1, 3).decides() == []


def test_a_whole_checkpoint_is_committed_once() -> None:
    story = Story().running(step=10).uploads(10)
    decision = story.decides_one()
    assert committed(decision) == (10, 1)
    assert "all 4 shards of step 10" in decision.reason
    assert story.uploads(10, 2).decides() == []
    assert story.commits(10).done(decision).decides() == []


def test_the_newest_goes_first_and_the_older_follow() -> None:
    story = Story().running(step=30).uploads(10).uploads(20)
    assert [committed(d) for d in story.decides()] == [(20, 1), (10, 1)]


def test_checkpoints_of_two_attempts_at_one_step_have_two_keys() -> None:
    story = Story().running(step=10).fails()
    story.starts()
    story.uploads(10).uploads(10, attempt=2)
    first, second = story.decides()
    assert {committed(first), committed(second)} == {(10, 1), (10, 2)}
    assert first.key != second.key


def test_a_dead_attempt_still_gets_its_commit() -> None:
    story = Story().running(step=10).fails().uploads(10)
    assert story.decides()[0].rule == "commit"


def test_a_refused_checkpoint_is_not_asked_for_again() -> None:
    story = Story().running(step=10).uploads(10)
    decision = story.decides_one()
    story.says(ev.CommitRefused(step=10, attempt=1, why="rank 2 lacks w")).done(decision, ok=False)
    assert story.uploads(10).later(1000).decides() == []


def test_a_commit_without_an_answer_is_tried_again_later_under_a_new_key() -> None:
    story = Story().running(step=10).uploads(10)
    first = story.decides_one()
    story.done(first, ok=False, detail="connection reset")
    assert story.decides() == []
    second = story.later(2).decides_one()
    assert committed(second) == (10, 1)
    assert second.key != first.key
    assert "asked again after 1" in second.reason
    story.done(second, ok=False)
    assert story.later(3).decides() == []
    assert committed(story.later(1).decides_one()) == (10, 1)


def test_retries_of_a_commit_never_stop_and_never_rush() -> None:
    story = Story().running(step=10).uploads(10)
    for _ in range(40):
        decision = story.decides_one()
        story.done(decision, ok=False)
        assert story.decides() == []
        story.later(60)
    story.done(story.decides_one()).commits(10)
    assert story.state.failed_commits == {}
