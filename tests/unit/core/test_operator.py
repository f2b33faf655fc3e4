"""What a person asked for."""

from orchestrator.core import events as ev
from orchestrator.core.actions import Finish, Outcome, Snapshot, StopRanks, Wait
from tests.unit.core.story import Story

STOPPED = Finish(outcome=Outcome.STOPPED)


def asked(what: str, story: Story) -> Story:
    return story.says(ev.OperatorSaid(what=what))


def test_a_stop_lets_the_ranks_save_and_waits_for_the_upload() -> None:
    story = asked("stop", Story().running(step=5))
    decision = story.decides()[0]
    assert decision.action == StopRanks(attempt=1, nodes=("n1", "n2"), planned=True)
    assert decision.evidence == (story.state.stop_requested_seq,)
    story.stages(7).exits(0, 1, 2, 3)
    assert not story.attempt.needs_verdict
    assert isinstance(story.decides_one().action, Wait)
    commit = story.uploads(7).decides()[0]
    end = story.commits(7).done(commit).decides_one()
    assert end.action == STOPPED
    assert "step 7" in end.reason
    assert story.done(end).decides() == []


def test_a_stop_before_the_start_ends_at_once() -> None:
    assert asked("stop", Story()).decides_one().action == STOPPED
    assert asked("stop", Story().launched()).decides_one().action == STOPPED


def test_a_stop_is_not_sent_to_a_lost_node() -> None:
    story = asked("stop", Story().running(step=5).loses("n1"))
    assert story.decides()[0].action == StopRanks(attempt=1, nodes=("n2",), planned=True)


def test_after_a_stop_nothing_is_started_again() -> None:
    story = Story().running(step=5).fails()
    assert asked("stop", story).decides_one().action == STOPPED


def test_a_stop_during_a_recovery_waits_for_the_ranks() -> None:
    story = Story().running(step=5).exits(0, code=-9)
    story.decides()
    assert isinstance(asked("stop", story).decides_one().action, Wait)
    assert story.stops().judged().decides()[-1].action == STOPPED


def test_a_stop_waits_for_the_upload_of_what_the_attempt_started_from() -> None:
    story = Story().running(step=20).stages(20).uploads(20, 0).fails()
    story.starts()
    asked("stop", story).decides()
    story.stops()
    assert isinstance(story.decides_one().action, Wait)


def test_a_snapshot_points_to_a_step_that_every_rank_has_before_it() -> None:
    story = asked("snapshot", Story().running(step=5).steps(9, step_s=0.1))
    decision = story.decides_one()
    assert decision.action == Snapshot(attempt=1, step=9 + 10)
    assert decision.evidence == (story.state.snapshot_requested_seq,)


def test_a_snapshot_waits_until_the_run_steps() -> None:
    story = asked("snapshot", Story().running())
    assert story.decides() == []
    assert isinstance(story.steps(1).decides_one().action, Snapshot)


def test_each_request_makes_one_snapshot() -> None:
    story = asked("snapshot", Story().running(step=5))
    first = story.decides_one()
    assert story.decides() == []
    second = asked("snapshot", story).decides_one()
    assert first.key != second.key
