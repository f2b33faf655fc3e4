"""How facts change the state."""

import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import Decision, SetInterval
from orchestrator.core.fold import HANDLERS, KEPT_UPLOADS, fold
from orchestrator.core.node import AllocationPhase
from orchestrator.core.record import Origin
from orchestrator.core.state import AttemptPhase, RunPhase, State
from tests.unit.core.story import Story


def test_every_event_kind_has_a_handler() -> None:
    assert set(HANDLERS) == set(ev.Event.__args__)


def test_fold_changes_no_older_state() -> None:
    story = Story()
    before = story.state
    story.running(step=4)
    assert before.nodes == {}
    assert before.attempt is None


def test_records_folded_again_give_the_same_state() -> None:
    story = Story().running((20, 1), step=24).uploads(30).fails()
    state = State()
    for record in story.records:
        state = fold(state, record)
    assert repr(state) == repr(story.state)


def test_a_fact_sent_twice_counts_once() -> None:
    story = Story().running()
    attempt = story.attempt.number
    exited = ev.RankExited(attempt=attempt, node="n1", rank=0, code=-9, ours=False)
    story.says(exited, origin=Origin(node="n1", incarnation="i1", n=5))
    clues = story.attempt.clues
    story.says(
        ev.UploadFailed(attempt=1, step=1, rank=0, error="late"),
        origin=Origin(node="n1", incarnation="i1", n=4),
    )
    story.says(exited, origin=Origin(node="n1", incarnation="i1", n=5))
    assert story.attempt.clues == clues
    assert story.state.last_upload_error == ""


def test_a_new_incarnation_counts_its_messages_from_one() -> None:
    story = Story().running()
    error = ev.UploadFailed(attempt=1, step=1, rank=0, error="first")
    story.says(error, origin=Origin(node="n3", incarnation="i1", n=7))
    story.joins("n3", incarnation="i2")
    story.says(
        ev.UploadFailed(attempt=1, step=2, rank=0, error="second"),
        origin=Origin(node="n3", incarnation="i2", n=1),
    )
    assert story.state.last_upload_error == "second"


def test_what_a_replaced_agent_says_late_counts_nothing() -> None:
    story = Story().running().stages(8)
    story.joins("n1", incarnation="i2")
    story.says(
        ev.Staged(node="n1", shards=(ev.StagedShard(rank=0, step=8, attempt=1),)),
        origin=Origin(node="n1", incarnation="i1", n=99),
    )
    assert story.state.nodes["n1"].staged == ()
    story.joins("n1", incarnation="i1")
    assert story.state.nodes["n1"].incarnation == "i2"
    assert story.state.is_fenced("n1", "i1")


def test_a_repeated_fact_does_not_hide_the_time_under_load() -> None:
    story = Story().running()
    before = story.state.measured.node_s
    seen = Origin(node="n1", incarnation="i1", n=1)
    error = ev.UploadFailed(attempt=1, step=1, rank=0, error="x")
    story.later(10).says(error, origin=seen)
    story.later(10).says(error, origin=seen)
    assert story.state.measured.node_s - before == pytest.approx(2 * 20)


def test_a_clock_that_steps_back_counts_no_time_under_load() -> None:
    story = Story().running()
    before = story.state.measured.node_s
    story.later(-500).says(ev.JobObserved(job="j", state="running"))
    assert story.state.measured.node_s == before


def test_losing_an_agent_that_was_replaced_changes_nothing() -> None:
    story = Story().running()
    story.joins("n3", incarnation="i2")
    story.says(ev.AgentLost(node="n3", incarnation="i1", why="old", silent_s=1.0))
    assert story.state.nodes["n3"].alive


def test_a_replaced_agent_takes_its_ranks_with_it() -> None:
    story = Story().running()
    story.joins("n2", incarnation="i2")
    assert story.attempt.lost == {"n2"}
    assert story.attempt.first_trouble is not None


def test_an_agent_that_reconnects_loses_nothing() -> None:
    story = Story().running()
    story.joins("n2", attempt=1)
    assert story.attempt.lost == frozenset()
    assert story.state.is_current("n2", "i1")


def test_a_lost_agent_is_taken_back_only_without_ranks() -> None:
    story = Story().running().loses("n2")
    story.joins("n2", attempt=1)
    assert not story.state.nodes["n2"].alive
    assert not story.state.is_current("n2", "i1")
    story.joins("n2", attempt=0)
    assert story.state.nodes["n2"].alive
    assert story.attempt.lost == {"n2"}


def test_a_lost_node_has_no_memory_left() -> None:
    story = Story().running().stages(8).loses("n2")
    assert story.state.nodes["n1"].staged
    assert story.state.nodes["n2"].staged == ()


def test_an_exclusion_outlives_the_agent() -> None:
    story = Story().running(step=5).fails("gpu", "node", node="n1", rank=0)
    story.decides()
    story.joins("n1", incarnation="i2")
    assert story.state.nodes["n1"].excluded


def test_an_unreadable_catalogue_is_not_an_empty_one() -> None:
    story = Story()
    story.says(ev.CatalogueRead(commits=((20, 1),)))
    story.says(ev.CatalogueUnknown(why="timeout"))
    assert story.state.commits == ((20, 1),)
    assert story.state.catalogue_problem == "timeout"


def test_a_catalogue_never_takes_a_commit_away() -> None:
    story = Story().running().commits(30)
    story.says(ev.CatalogueRead(commits=((20, 1),)))
    assert story.state.commits == ((30, 1), (20, 1))
    assert story.state.catalogue_problem == ""


def test_the_attempt_runs_when_all_its_agents_say_so() -> None:
    story = Story().launched().joins("n1", "n2").says(ev.CatalogueRead(commits=()))
    story.decides()
    story.confirms("n1")
    assert story.attempt.phase is AttemptPhase.STARTING
    story.confirms("n2")
    assert story.attempt.phase is AttemptPhase.RUNNING
    assert story.attempt.started_at == story.now


def test_facts_about_an_older_attempt_change_nothing() -> None:
    story = Story().running(step=5).fails()
    story.starts()
    before = story.attempt
    story.says(
        ev.RankExited(attempt=1, node="n1", rank=1, code=1, ours=False),
        ev.RanksStarted(attempt=1, node="n1", ranks=(), pids=()),
        ev.RanksGone(attempt=1, node="n1"),
        ev.PhaseReached(attempt=1, phase="first_step", step=50, age_s=0),
        ev.RankOverdue(attempt=1, node="n1", rank=1, phase="step", step=3, for_s=9),
    )
    assert story.attempt == before


def test_progress_of_an_older_attempt_changes_no_counter() -> None:
    story = Story().running(step=5).fails()
    story.starts()
    story.says(
        ev.Progress(
            attempt=1,
            min_step=9,
            max_step=9,
            loss=9.0,
            step_s=9.0,
            stall_s=9.0,
            saves=9,
            skipped_saves=9,
            tokens=9,
        )
    )
    assert story.state.saves == 0
    assert story.state.best_step == 5
    assert story.state.measured.step_s == 0.5


def test_a_measurement_that_is_missing_replaces_none() -> None:
    story = Story().running(step=5)
    story.steps(6, loss=float("nan"), step_s=float("nan"))
    assert story.state.loss == 1.0
    assert story.state.measured.step_s == 0.5


def test_one_stall_is_counted_once_per_save() -> None:
    story = Story().running(step=5)
    story.steps(6, stall_s=0.2, saves=1)
    story.steps(7, stall_s=0.2, saves=1)
    assert story.state.measured.stall_s == (0.2,)


def test_an_attempt_is_over_when_each_rank_exited_or_lost_its_node() -> None:
    story = Story().running().loses("n2").exits(0, code=1)
    assert story.attempt.is_live
    story.later(3).exits(1, code=-15, ours=True)
    assert not story.attempt.is_live
    assert story.attempt.over_at == story.now


def test_ranks_that_never_started_end_with_the_word_of_their_agent() -> None:
    story = Story().launched().joins("n1", "n2").says(ev.CatalogueRead(commits=()))
    story.decides()
    story.confirms("n1")
    story.later(100).decides()
    story.exits(0, 1, code=-15, ours=True)
    assert story.attempt.is_live
    story.says(ev.RanksGone(attempt=1, node="n2"))
    assert not story.attempt.is_live
    assert story.attempt.needs_verdict


def test_the_first_exit_of_a_rank_counts() -> None:
    story = Story().running().exits(0, code=-9).exits(0, code=-15, ours=True)
    assert story.attempt.exits == {0: -9}


def test_an_exit_that_we_asked_for_is_no_trouble() -> None:
    story = Story().running().exits(0, code=-15, ours=True)
    assert story.attempt.first_trouble is None


def test_trouble_begins_when_it_happened_not_when_it_was_told() -> None:
    story = Story().running()
    story.says(ev.RankExited(attempt=1, node="n1", rank=0, code=1, ours=False, age_s=7.0))
    assert story.attempt.trouble_since == story.now - 7.0
    assert story.attempt.first_trouble is not None
    assert story.attempt.first_trouble.at == story.now


def test_a_silent_node_was_gone_since_its_last_word() -> None:
    story = Story().running().loses("n1", silent_s=30.0)
    assert story.attempt.trouble_since == story.now - 30.0


def test_a_node_that_leaves_after_its_ranks_finished_is_no_trouble() -> None:
    story = Story().running().exits(2, 3).loses("n2")
    assert story.attempt.first_trouble is None


def test_a_signature_alone_is_no_trouble() -> None:
    story = Story().running()
    story.says(
        ev.SignatureSeen(
            attempt=1,
            node="n1",
            rank=0,
            signature="nccl",
            fault="network",
            secondary=True,
            confidence=0.5,
            culprit_node="",
            culprit_rank=None,
            text="NCCL WARN",
        )
    )
    assert story.attempt.first_trouble is None
    assert [clue.kind for clue in story.attempt.clues] == ["signature"]


def test_the_incident_tells_its_phases() -> None:
    story = Story().running(step=5).commits(4).later(10)
    story.exits(0, code=-9).decides()
    story.later(2).stops().judged()
    assert story.incident.detected_at == 1010.0
    assert story.incident.stopped_at == 1012.0
    decision = story.decides_one()
    story.later(1).confirms()
    for phase, step in (("restore", 4), ("step", 4), ("first_step", 5)):
        story.later(1).says(ev.PhaseReached(attempt=2, phase=phase, step=step, age_s=0.5))
    incident = story.incident
    assert incident.decision == decision.reason
    assert (incident.next_attempt, incident.resumed_step) == (2, 4)
    times = (incident.started_at, incident.restoring_at, incident.stepping_at)
    assert times == (1013.0, 1013.5, 1014.5)
    assert incident.first_step_at == 1015.5
    assert story.state.phase is RunPhase.RUNNING


def test_a_later_attempt_does_not_change_a_closed_incident() -> None:
    story = Story().running(step=5).fails()
    story.starts()
    story.steps(6)
    closed = story.incident
    story.fails()
    assert story.state.incidents[0] == closed
    assert [i.number for i in story.state.incidents] == [1, 2]


def test_a_second_verdict_on_an_attempt_does_not_count() -> None:
    story = Story().running(step=5).fails().judged("gpu", "node")
    assert len(story.state.incidents) == 1


def test_the_best_step_never_falls() -> None:
    story = Story().running()
    story.says(ev.PhaseReached(attempt=1, phase="first_step", step=11, age_s=0))
    story.fails()
    assert story.state.best_step == 11
    story.starts()
    story.fails()
    assert [i.best_step for i in story.state.incidents] == [11, 11]


def test_a_commit_beyond_the_best_step_forgives() -> None:
    story = Story().running(step=12).fails()
    story.commits(12)
    assert not story.incident.forgiven
    story.commits(13, attempt=2)
    assert story.incident.forgiven


def test_a_commit_is_measured_by_its_slowest_shard_and_once() -> None:
    story = Story().running(step=12).uploads(10, 0, 1, 2).uploads(10, 3, upload_s=9.0)
    story.commits(10).commits(10)
    assert story.state.measured.upload_s == (9.0,)
    assert story.state.uploads == {}


def test_shards_of_a_settled_checkpoint_are_not_collected_again() -> None:
    story = Story().running(step=12).uploads(10).commits(10).uploads(10, 0)
    story.uploads(11).says(ev.CommitRefused(step=11, attempt=1, why="torn")).uploads(11, 0)
    assert story.state.uploads == {}
    assert story.state.refused_why == "torn"


def test_shards_left_over_by_older_attempts_push_out_no_newer_ones() -> None:
    story = Story().running((10, 1), step=40)
    for step in range(20, 20 + KEPT_UPLOADS):
        story.uploads(step, 0)
    story.fails()
    story.starts()
    story.uploads(11, attempt=2)
    assert (11, 2) in story.state.uploads
    assert len(story.state.uploads) == KEPT_UPLOADS


def test_an_answered_action_is_no_longer_pending() -> None:
    story = Story()
    decision = story.decides_one()
    assert list(story.state.pending) == [decision.key]
    story.done(decision, detail="job-1").done(decision, ok=False)
    assert story.state.pending == {}
    (given,) = story.state.allocations
    assert (given.job, given.phase) == ("job-1", AllocationPhase.RUNNING)


def test_orders_for_an_attempt_end_with_it() -> None:
    story = Story().launched().joins("n1", "n2").says(ev.CatalogueRead(commits=()))
    start = story.decides_one()
    assert start.key in story.state.pending
    story.exits(0, code=1)
    stop = story.decides_one()
    assert list(story.state.pending) == [stop.key]
    story.stops()
    assert story.state.pending == {}
    story.judged()
    again = story.decides_one()
    assert list(story.state.pending) == [again.key]


def test_an_attempt_that_ends_by_itself_takes_its_orders_along() -> None:
    story = Story().launched().joins("n1", "n2").says(ev.CatalogueRead(commits=()))
    story.decides()
    story.says(ev.OperatorSaid(what="snapshot")).confirms().steps(1).decides()
    assert len(story.state.pending) == 2
    story.exits(0, 1, 2).loses("n2")
    assert not story.attempt.is_live
    assert story.state.pending == {}


def test_the_run_is_over_when_the_finish_is_done() -> None:
    story = Story(checkpoints=False).running(step=3).exits(0, 1, 2, 3)
    decision = story.decides_one()
    assert not story.state.over
    story.done(decision)
    assert story.state.over
    assert story.state.phase is RunPhase.OVER


def test_an_interval_that_reached_no_rank_is_not_taken_for_the_one_in_force() -> None:
    story = Story().running(step=20)
    before = story.state.interval_steps
    change = SetInterval(
        attempt=1,
        interval_steps=before * 2,
        effective_step=30,
        previous_steps=before,
        goodput=0.9,
        binding="optimum",
        inputs={},
    )
    decision = Decision(key="r/1/set_interval/9", rule="interval", action=change, reason="why")
    story.says(ev.DecisionMade(decision=decision))
    assert story.state.interval_steps == before * 2
    assert story.done(decision, ok=False).state.interval_steps == before
