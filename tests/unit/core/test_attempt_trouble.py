"""An attempt that cannot go on is stopped on all nodes at once."""

from orchestrator.core import events as ev
from orchestrator.core.actions import StopRanks
from orchestrator.core.state import AttemptPhase
from tests.unit.core.story import Story


def test_a_dead_rank_stops_the_others() -> None:
    story = Story().running().exits(2, code=-9)
    decision = story.decides_one()
    assert decision.action == StopRanks(attempt=1, nodes=("n1", "n2"))
    assert "rank 2 on n2 was ended by signal 9" in decision.reason
    assert decision.evidence == (story.attempt.clues[0].seq,)
    assert story.attempt.phase is AttemptPhase.STOPPING


def test_a_rank_that_left_early_with_an_error_stops_the_others() -> None:
    story = Story().running().exits(1, code=3)
    assert "rank 1 on n1 exited with code 3" in story.decides_one().reason


def test_a_rank_that_finished_stops_nobody() -> None:
    assert Story().running().exits(0).decides() == []


def test_a_hung_rank_stops_the_others() -> None:
    story = Story().running()
    story.says(ev.RankOverdue(attempt=1, node="n2", rank=3, phase="step", step=7, for_s=2.25))
    assert "rank 3 on n2 has been in phase step 2.2 s too long" in story.decides_one().reason


def test_a_lost_node_is_not_told_to_stop() -> None:
    story = Story().running().loses("n2")
    decision = story.decides_one()
    assert decision.action == StopRanks(attempt=1, nodes=("n1",))
    assert "n2 is gone (silent)" in decision.reason


def test_nothing_is_stopped_twice_for_one_trouble() -> None:
    story = Story().running().exits(2, code=-9)
    story.decides()
    assert story.exits(3, code=1).decides() == []


def test_agents_that_confirm_no_start_in_time_end_the_attempt() -> None:
    story = Story().launched().joins("n1", "n2").says(ev.CatalogueRead(commits=()))
    story.decides()
    story.confirms("n2").later(60)
    assert story.next() is None
    decision = story.later(0.1).decides_one()
    assert decision.rule == "slow_start"
    assert decision.action == StopRanks(attempt=1, nodes=("n1", "n2"))
    assert "no start confirmed by n1 within 60 s" in decision.reason


def test_the_time_without_a_supervisor_is_no_slow_start() -> None:
    story = Story().launched().joins("n1", "n2").says(ev.CatalogueRead(commits=()))
    story.decides()
    story.later(3600).says(ev.LeaseTaken(epoch=2, holder="there"))
    assert story.next() is None
    assert story.later(61).decides_one().rule == "slow_start"


def test_a_stop_without_an_end_is_ordered_again() -> None:
    story = Story().running().exits(0, code=-9)
    first = story.decides_one()
    assert story.later(65).next() is None
    again = story.later(0.1).decides_one()
    assert again.rule == "stop_again"
    assert again.action == first.action
    assert again.key != first.key
    story.exits(1, code=-9).says(ev.RanksGone(attempt=1, node="n1"))
    third = story.later(66).decides_one()
    assert third.action == StopRanks(attempt=1, nodes=("n2",))


def test_a_planned_stop_that_takes_too_long_is_not_planned_any_more() -> None:
    story = Story().running(step=5).says(ev.OperatorSaid(what="stop"))
    story.decides()
    assert story.later(120).next() is None
    decision = story.later(6).decides()[0]
    assert decision.action == StopRanks(attempt=1, nodes=("n1", "n2"), planned=False)
    assert story.attempt.planned_stop
    story.stops()
    assert not story.attempt.needs_verdict
