"""When a run is done."""

import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import Finish, Outcome, Wait
from tests.unit.core.story import Story, policy

FINISHED = Finish(outcome=Outcome.FINISHED)


def test_a_run_is_done_when_every_rank_left_with_code_0() -> None:
    story = Story(checkpoints=False).running(step=5).exits(0, 1, 2)
    assert story.next() is None
    decision = story.exits(3).decides_one()
    assert decision.action == FINISHED
    assert story.decides() == []


def test_a_run_waits_for_its_last_upload() -> None:
    story = Story().running(step=20).stages(20).exits(0, 1, 2, 3)
    assert isinstance(story.decides_one().action, Wait)
    story.uploads(20)
    commit = story.decides()[0]
    decision = story.commits(20).done(commit).decides_one()
    assert decision.action == FINISHED
    assert "step 20, is committed" in decision.reason


def test_a_run_does_not_wait_for_ever_for_its_last_upload() -> None:
    story = Story().running(step=20).stages(20).exits(0, 1, 2, 3)
    story.decides()
    assert story.later(300).next() is None
    assert story.later(0.1).decides_one().action == FINISHED


def test_nodes_that_leave_during_the_last_upload_are_no_failure() -> None:
    story = Story().running(step=20).stages(20).uploads(20, 0).exits(0, 1, 2, 3)
    story.decides()
    story.loses("n1").loses("n2").loses("n3").says(ev.JobObserved(job="job-1", state="gone"))
    assert story.decides_one().action == FINISHED


def test_a_snapshot_that_some_rank_never_took_is_not_waited_for() -> None:
    story = Story().running(step=20)
    node = story.attempt.nodes[0]
    shards = (
        ev.StagedShard(rank=0, step=20, attempt=1),
        ev.StagedShard(rank=1, step=20, attempt=1),
    )
    story.says(ev.Staged(node=node, shards=shards)).exits(0, 1, 2, 3)
    assert story.decides_one().action == FINISHED


def test_a_shard_that_will_never_be_whole_holds_up_no_finish() -> None:
    story = Story().running(step=30).commits(10).uploads(30, 0).fails()
    story.starts()
    story.steps(20).stages(20, attempt=2).uploads(20, attempt=2).exits(0, 1, 2, 3)
    commit = story.decides()[0]
    story.commits(20, attempt=2).done(commit)
    assert story.decides_one().action == FINISHED


@pytest.mark.parametrize("word", ["committed", "refused"])
def test_a_later_step_of_a_bad_past_does_not_stand_for_the_last_one(word: str) -> None:
    story = Story().running(step=40)
    if word == "committed":
        story.commits(10).commits(40).fails()
        story.starts()
        story.fails("restore_failed", "storage")
    else:
        story.says(ev.CommitRefused(step=40, attempt=1, why="torn")).fails()
    story.starts()
    story.steps(20).stages(20, attempt=story.attempt.number).exits(0, 1, 2, 3)
    assert isinstance(story.decides_one().action, Wait)


def test_ranks_that_we_stopped_and_that_left_with_code_0_did_not_finish() -> None:
    story = Story().running(step=5)
    story.says(ev.RankOverdue(attempt=1, node="n1", rank=0, phase="step", step=5, for_s=1))
    story.decides()
    story.exits(0, 1, 2, 3, code=0)
    assert story.decides() == []
    assert story.attempt.needs_verdict


def test_one_failed_rank_is_no_finish() -> None:
    story = Story(checkpoints=False).running(step=5).exits(0, 1, 2).exits(3, code=1)
    assert all(d.action != FINISHED for d in story.decides())


def test_the_end_that_a_script_did_not_save_is_named() -> None:
    story = Story().running(step=20).commits(20).steps(27).exits(0, 1, 2, 3)
    reason = story.decides_one().reason
    assert "step 20, is committed" in reason
    assert "7 STEPS AFTER IT WERE NOT SAVED" in reason
    unsaved = Story().running(step=20).exits(0, 1, 2, 3).decides_one().reason
    assert "NOTHING WAS SAVED" in unsaved


def test_a_run_whose_own_folders_are_kept_is_not_said_to_have_saved_nothing() -> None:
    story = Story(policy=policy(watches=True)).running(step=20).exits(0, 1, 2, 3)
    reason = story.decides_one().reason
    assert "SAVED" not in reason
    assert "checkpoint.watch" in reason
