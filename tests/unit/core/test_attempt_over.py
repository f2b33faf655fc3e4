"""Ends of an attempt that a restart does not cure."""

from orchestrator.core.actions import Decision, Finish, Outcome, StartRanks
from tests.unit.core.story import Story, policy


def failed(decision: Decision) -> bool:
    return decision.action == Finish(outcome=Outcome.FAILED)


def test_a_user_error_is_not_tried_again() -> None:
    story = Story().running().fails("user_error", "user", cause="KeyError: 'lr' on all ranks")
    decision = story.decides_one()
    assert failed(decision)
    assert decision.rule == "user_error"
    assert "KeyError: 'lr'" in decision.reason
    assert story.attempt.verdict_seq in decision.evidence


def test_a_full_disk_before_the_first_step_ends_the_run() -> None:
    decision = Story().running().fails("storage", "storage").decides_one()
    assert failed(decision)
    assert decision.rule == "storage_error"


def test_a_full_disk_in_the_middle_of_training_is_tried_again() -> None:
    decision = Story().running(step=5).fails("storage", "storage").decides_one()
    assert isinstance(decision.action, StartRanks)


def test_a_failed_restore_falls_back_to_the_next_older_checkpoint() -> None:
    story = Story().running((30, 1), (20, 1))
    story.fails("restore_failed", "storage")
    decision = story.decides_one()
    assert isinstance(decision.action, StartRanks)
    assert decision.action.restore is not None
    assert decision.action.restore.step == 20


def test_the_same_fault_without_a_new_step_ends_the_run() -> None:
    story = Story().running(step=5)
    for _ in range(2):
        story.fails()
        story.starts()
    decision = story.fails().decides_one()
    assert failed(decision)
    assert decision.rule == "no_progress"
    assert "stuck at step 5" in decision.reason


def test_a_new_step_between_two_equal_faults_is_progress() -> None:
    story = Story().running(step=5)
    for step in (6, 7, 8):
        story.fails()
        story.starts()
        story.steps(step)
    assert isinstance(story.fails().decides_one().action, StartRanks)


def test_preemption_costs_nothing_however_often_it_comes() -> None:
    story = Story().running(step=5)
    for _ in range(8):
        story.fails("preempted", "free")
        story.starts()


def test_the_budget_is_per_class() -> None:
    story = Story(policy=policy(budget={"process": 1, "node": 1})).running(step=5)
    story.fails("rank_killed", "process")
    story.starts()
    story.fails("network", "node")
    story.starts()
    decision = story.fails("hang", "process").decides_one()
    assert failed(decision)
    assert decision.rule == "budget_spent"
    assert "2 without a newer checkpoint in 24 h, 1 allowed" in decision.reason


def test_a_committed_checkpoint_refills_the_budget() -> None:
    story = Story(policy=policy(budget={"process": 1})).running(step=5)
    for step in range(6, 12):
        story.fails("rank_killed", "process")
        story.starts()
        story.steps(step).commits(step, attempt=story.attempt.number)


def test_the_budget_forgets_what_is_older_than_its_window() -> None:
    story = Story(policy=policy(budget={"process": 1}, budget_window_s=100.0)).running(step=5)
    for fault in ("rank_killed", "hang", "rank_crashed"):
        story.later(101).fails(fault, "process")
        story.starts()


def test_a_class_without_a_budget_is_not_limited() -> None:
    story = Story(policy=policy(budget={})).running(step=5)
    for fault in ("rank_killed", "hang") * 4:
        story.fails(fault, "process")
        story.starts()


def test_a_run_with_history_never_starts_over_by_itself() -> None:
    story = Story().running((20, 1))
    decision = story.fails("restore_failed", "storage").decides_one()
    assert failed(decision)
    assert decision.rule == "history_unusable"


def test_a_suspect_node_is_kept_when_only_its_memory_can_be_restored() -> None:
    story = Story().running((20, 1))
    story.steps(24).stages(24)
    story.fails("restore_failed", "storage")  # the store's only checkpoint is bad
    story.exits()
    decision = story.decides_one()
    assert isinstance(decision.action, StartRanks)
    story.confirms().done(decision).steps(25)
    story.fails("gpu", "node", node="n1", rank=0)
    decision = story.decides_one()
    assert isinstance(decision.action, StartRanks)
    assert decision.action.nodes == ("n1", "n2")
    assert decision.action.exclude == ()
    assert decision.action.restore is not None
    assert decision.action.restore.step == 24
