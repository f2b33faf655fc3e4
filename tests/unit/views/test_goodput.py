import math

import pytest

from orchestrator.core import events as ev
from orchestrator.views.goodput import Use, account, phases, steps_lost
from orchestrator.views.history import History
from tests.unit.core.story import Story as CoreStory
from tests.unit.views.story import START, Story, whole_story


def accounted(story: Story, now: float | None = None):
    state, history = History.of(story.records)
    return state, account(state, history, story.at if now is None else now)


def test_the_parts_sum_to_the_wall_time() -> None:
    _, goodput = accounted(whole_story())
    assert math.isclose(sum(goodput.seconds.values()), goodput.wall_s, abs_tol=1e-6)
    assert all(value >= 0 for value in goodput.seconds.values())


@pytest.mark.parametrize("length", range(1, 500, 7))
def test_the_parts_sum_to_the_wall_time_at_every_moment(length: int) -> None:
    records = whole_story().records[:length]
    state, history = History.of(records)
    goodput = account(state, history, state.at + 1.0)
    assert math.isclose(sum(goodput.seconds.values()), goodput.wall_s, abs_tol=1e-6)


def test_an_undisturbed_run_loses_nothing() -> None:
    _, goodput = accounted(Story().launch().train(100).finish())
    assert goodput.seconds[Use.LOST] == 0
    assert goodput.seconds[Use.DETECT] == goodput.seconds[Use.STOP] == 0
    assert goodput.seconds[Use.RESTORE] == pytest.approx(0.5)
    assert goodput.seconds[Use.FIRST_STEP] == pytest.approx(0.7)
    assert goodput.ratio == pytest.approx(goodput.seconds[Use.STEP] / goodput.wall_s)


def test_steps_that_run_again_are_lost_work_and_not_productive() -> None:
    story = Story().launch().train(75)
    assert story.state.commits[0][0] == 40
    story.kill_rank().up().train(90)
    _, goodput = accounted(story)
    # 35 steps of 0.12 s, what the story spends on committing step 40, and the step in flight.
    assert goodput.seconds[Use.LOST] == pytest.approx(35 * 0.12 + 0.16 + 0.05, abs=0.01)


def test_work_before_a_fault_counts_as_lost_only_once_a_restart_threw_it_away() -> None:
    story = Story().launch().train(75)
    _, before = accounted(story)
    assert before.seconds[Use.LOST] == 0


def test_an_older_checkpoint_makes_earlier_attempts_lose_their_steps_too() -> None:
    story = Story().launch().train(45).kill_rank().up().train(60).kill_rank()
    records = list(story.records)
    _, goodput = accounted(story)
    assert goodput.seconds[Use.LOST] > 15 * 0.12
    assert records == story.records


def test_checkpoint_stalls_are_taken_out_of_productive_time() -> None:
    _, goodput = accounted(Story().launch().train(50))
    assert goodput.seconds[Use.CHECKPOINT] == pytest.approx(2 * 0.03)


def test_time_without_a_supervisor_is_not_lost() -> None:
    story = Story().launch().train(50)
    _, with_one = accounted(story)
    story.replace_supervisor(away_s=4.0)
    _, goodput = accounted(story)
    assert goodput.away_s == pytest.approx(4.0)
    assert goodput.seconds[Use.STEP] == pytest.approx(with_one.seconds[Use.STEP] + 4.0)


def test_a_run_that_is_over_gets_no_longer() -> None:
    story = Story().launch().train(20).finish()
    _, at_end = accounted(story)
    _, much_later = accounted(story, now=story.at + 1e6)
    assert much_later.wall_s == at_end.wall_s


def test_a_clock_that_steps_back_never_makes_time_negative() -> None:
    story = Story().launch().train(30)
    story.at -= 20.0
    story.kill_rank().up().train(40)
    _, goodput = accounted(story)
    assert all(value >= 0 for value in goodput.seconds.values())
    assert math.isclose(sum(goodput.seconds.values()), goodput.wall_s, abs_tol=1e-6)


def test_a_script_without_heartbeats_is_unmeasured_and_not_productive() -> None:
    records = [r for r in Story().launch().records if not isinstance(r.event, ev.PhaseReached)]
    state, history = History.of(records)
    goodput = account(state, history, state.at + 100.0)
    assert goodput.seconds[Use.STEP] == 0
    assert goodput.seconds[Use.UNMEASURED] == pytest.approx(100.0)


def test_before_anything_happened_there_is_no_ratio() -> None:
    state, history = History.of(Story().records)
    goodput = account(state, history, START)
    assert goodput.ratio is None
    assert goodput.wall_s == 0


def test_the_phases_of_an_incident_sum_to_its_total() -> None:
    state, _ = History.of(whole_story().records)
    for incident in state.incidents:
        found = phases(incident)
        parts = [
            found.detect_s,
            found.stop_s,
            found.start_s,
            found.restore_s,
            found.first_step_s,
        ]
        assert None not in parts
        assert sum(parts) == pytest.approx(found.total_s)


def test_phases_that_were_not_reached_are_not_measured() -> None:
    state, _ = History.of(Story().launch().train(30).kill_rank().records)
    found = phases(state.incidents[-1])
    assert found.detect_s == pytest.approx(0.15)
    assert found.stop_s is not None
    assert found.start_s is found.restore_s is found.first_step_s is found.total_s is None


def test_steps_lost_are_those_behind_the_restored_checkpoint() -> None:
    state, _ = History.of(Story().launch().train(75).kill_rank().records)
    assert steps_lost(state.incidents[-1]) == 35


def test_steps_lost_are_unknown_while_nothing_was_restarted() -> None:
    records = Story().launch().train(30).kill_rank().records
    cut = next(k for k, r in enumerate(records) if isinstance(r.event, ev.FaultJudged))
    state, _ = History.of(records[: cut + 1])
    assert steps_lost(state.incidents[-1]) is None


def test_the_time_between_a_planned_move_and_the_next_start_is_queue_and_no_end() -> None:
    story = CoreStory().launched().joins("n1", "n2", "n3")
    story.says(ev.CatalogueRead(commits=()))
    story.later(10).starts()
    story.later(5).steps(5)
    story.later(20).says(ev.NodeLeaving(node="n2", why="DRAIN"))
    (stop,) = story.decides()
    assert stop.rule == "move"
    story.later(2).exits(0, 1, 2, 3).judged("moved", "free")
    story.later(30).decides()
    state, history = History.of(story.records)
    account_ = account(state, history, story.now)
    assert account_.seconds[Use.QUEUE] == pytest.approx(10 + 30)
    assert account_.seconds[Use.STOP] == pytest.approx(2)
    assert account_.seconds[Use.FINISH] == 0
    found = phases(state.incidents[-1])
    assert (found.detect_s, found.stop_s) == (0.0, 2.0)
