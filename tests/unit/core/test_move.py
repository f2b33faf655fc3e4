"""Leaving nodes of one's own accord, and worlds that shrink and grow."""

import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import GiveBack, Launch, Source, StartRanks, StopRanks
from orchestrator.core.decide import decide
from orchestrator.core.placement import place, place_smaller
from tests.unit.core.story import Story, bare, policy

REPLACING = policy(replace_nodes=True)


def running(**more: object) -> Story:
    story = Story(**{"policy": REPLACING, **more}).launched()  # type: ignore[arg-type]
    story.joins(*(f"n{k + 1}" for k in range(story.nodes + story.spares)), job="job-1")
    if story.checkpoints:
        story.says(ev.CatalogueRead(commits=()))
    story.starts()
    return story.steps(5)


def drained(story: Story, name: str) -> Story:
    return story.says(ev.NodeLeaving(node=name, why="DRAIN: bad fan"))


def saved(story: Story, step: int) -> Story:
    """The ranks saved at `step`, left, and their parts are in the store."""
    story.stages(step, attempt=story.attempt.number).exits(*range(story.attempt.world))
    return story.uploads(step, attempt=story.attempt.number)


def test_a_node_that_is_wanted_back_is_left_with_nothing_lost() -> None:
    story = drained(running(), "n2")
    (stop,) = story.decides()
    assert stop.action == StopRanks(attempt=1, nodes=("n1", "n2"), planned=True, moved="moved")
    left = "n2 is to be left (n2: DRAIN: bad fan)"
    assert stop.reason == f"{left}, and others are there for its ranks"
    story.stages(7).exits(0, 1, 2, 3)
    assert story.attempt.needs_verdict
    story.judged("moved", "free", cause="n2 is to be left")
    (wait,) = story.decides()
    assert "upload" in wait.reason
    commit = story.uploads(7).decides()[0]
    start = story.commits(7).done(commit).decides()[0]
    assert isinstance(start.action, StartRanks)
    assert start.action.nodes == ("n1", "n3")
    assert start.action.restore is not None
    assert (start.action.restore.step, start.action.restore.source) == (7, Source.STORE)
    assert start.rule == "spare_takes_over"
    (ask,) = story.confirms().steps(8).decides()
    assert bare(ask.action) == Launch(nodes=1)


def test_a_move_is_free_of_charge() -> None:
    story = drained(running(), "n2")
    story.decides()
    story.stages(7).exits(0, 1, 2, 3).judged("moved", "free").uploads(7).commits(7).decides()
    assert story.incident.fault_class == "free"
    assert story.notes == []


def test_a_node_is_not_left_for_nowhere() -> None:
    story = drained(running(spares=0), "n2")
    assert [type(d.action) for d in story.decides()] == [Launch]
    assert story.attempt.is_live
    story.says(ev.ActionDone(key=story.state.allocations[-1].key, ok=True, detail="job-2"))
    stop = story.joins("n9", job="job-2").decides()[0]
    assert isinstance(stop.action, StopRanks)


def test_a_node_that_may_stay_after_all_is_not_left() -> None:
    story = drained(running(spares=0), "n2").says(ev.NodeLeaving(node="n2", why=""))
    assert story.decides() == []


def test_a_leaving_spare_moves_nobody() -> None:
    story = drained(running(), "n3")
    assert [type(d.action) for d in story.decides()] == [Launch]


def test_without_checkpoints_nothing_is_left_of_ones_own_accord() -> None:
    story = drained(running(checkpoints=False), "n2")
    assert [type(d.action) for d in story.decides()] == [Launch]


def test_a_leaving_node_is_used_when_there_is_no_other() -> None:
    story = drained(running(spares=0), "n2")
    story.decides()
    start = story.fails().decides()[0]
    assert isinstance(start.action, StartRanks)
    assert start.action.nodes == ("n1", "n2")


def test_a_node_that_a_person_excludes_is_left() -> None:
    excluded = {"n1": "alice: strange noises"}
    story = running().says(ev.LedgerRead(excluded=excluded, excluded_lately=0))
    stop = story.decides()[0]
    assert isinstance(stop.action, StopRanks)
    assert "alice: strange noises" in stop.reason


def test_a_node_that_the_ledger_gives_back_may_be_used_again() -> None:
    excluded = ev.LedgerRead(excluded={"n3": "alice: noises"}, excluded_lately=0)
    story = running().says(excluded)
    assert place(story.state, frozenset({"n2"})) is None
    story.says(ev.LedgerRead(excluded={}, excluded_lately=0))
    assert place(story.state, frozenset({"n2"})) == ("n1", "n3")


def test_a_warning_before_the_time_limit_empties_the_allocation() -> None:
    story = running()
    for name in ("n1", "n2", "n3"):
        story.says(ev.AgentWarned(node=name, signal="USR2", left_s=float("inf")))
    (stop,) = story.decides()
    assert isinstance(stop.action, StopRanks)
    assert stop.action.moved == "time_limit"
    saved(story, 7).judged("time_limit", "free").commits(7)
    ask, back, *_ = story.decides()
    assert (bare(ask.action), back.action) == (Launch(nodes=3), GiveBack(job="job-1"))
    story.says(ev.ActionDone(key=ask.key, ok=True, detail="job-2"))
    story.says(ev.JobObserved(job="job-2", state="queued", why="Resources"))
    for name in ("n1", "n2", "n3"):
        story.loses(name)
    story.says(ev.JobObserved(job="job-1", state="gone", ending=ev.Ending.CANCELLED))
    assert not any(d.rule == "operator.stop" for d in story.decides())
    story.says(ev.JobObserved(job="job-2", state="running"))
    story.joins("n1", "n2", "n3", incarnation="i2", job="job-2")
    start = story.decides()[0]
    assert isinstance(start.action, StartRanks)
    assert start.action.restore is not None
    assert start.action.restore.step == 7


def test_an_allocation_is_not_given_back_before_what_it_holds_is_stored() -> None:
    story = running()
    for name in ("n1", "n2", "n3"):
        story.says(ev.AgentWarned(node=name, signal="USR2", left_s=float("inf")))
    story.decides()
    story.stages(7).exits(0, 1, 2, 3).judged("time_limit", "free")
    assert not any(isinstance(d.action, GiveBack) for d in story.decides())


def test_one_agent_that_is_told_to_end_costs_one_node() -> None:
    story = running().says(ev.AgentWarned(node="n2", signal="TERM", left_s=25.0))
    stop = story.decides()[0]
    assert isinstance(stop.action, StopRanks)
    saved(story, 7).judged("allocation_ended", "free").commits(7)
    start = story.decides()[0]
    assert isinstance(start.action, StartRanks)
    assert start.action.nodes == ("n1", "n3")


def test_a_fault_during_a_move_is_an_incident_of_its_own_kind() -> None:
    story = drained(running(), "n2")
    story.decides()
    story.exits(0, code=-9)
    story.decides()
    story.stops()
    assert story.attempt.needs_verdict
    start = story.judged().decides()[0]
    assert isinstance(start.action, StartRanks)


@pytest.mark.parametrize("least", [0, 2])
def test_a_run_that_may_not_shrink_waits(least: int) -> None:
    story = running(spares=0, policy=policy(min_nodes=least)).loses("n2")
    story.decides()
    story.stops().judged("node_lost", "node", node="n2")
    assert [d.rule for d in story.decides()] == ["no_capacity"]


def test_a_run_that_may_shrink_goes_on_smaller_and_grows_again() -> None:
    story = running(nodes=3, spares=0, policy=policy(min_nodes=2, replace_nodes=True))
    story.stages(5).uploads(5).commits(5).loses("n2")
    story.decides()
    (start,) = story.stops().judged("node_lost", "node", node="n2").decides()
    assert isinstance(start.action, StartRanks)
    assert (start.rule, start.action.nodes) == ("shrink", ("n1", "n3"))
    assert start.action.restore is not None
    assert start.action.restore.source is Source.STORE
    assert "go on with 2 nodes instead of 3" in start.reason
    (ask,) = story.confirms().steps(6).decides()
    assert bare(ask.action) == Launch(nodes=1)
    story.says(ev.ActionDone(key=ask.key, ok=True, detail="job-2")).joins("n9", job="job-2")
    stop = story.decides()[0]
    assert isinstance(stop.action, StopRanks)
    assert stop.action.moved == "moved"
    assert "n9 came" in stop.reason
    saved(story, 8).judged("moved", "free").commits(8, attempt=2)
    again = story.decides()[0]
    assert isinstance(again.action, StartRanks)
    assert (again.rule, again.action.nodes) == ("grow", ("n1", "n3", "n9"))


def test_a_snapshot_of_another_world_is_no_snapshot() -> None:
    story = running(nodes=3, spares=0, policy=policy(min_nodes=2))
    shards = {n: (2 * k, 2 * k + 1) for k, n in enumerate(("n1", "n2", "n3"))}
    for name, ranks in shards.items():
        found = tuple(ev.StagedShard(rank=r, step=5, attempt=1, world=6) for r in ranks)
        story.says(ev.Staged(node=name, shards=found))
    story.loses("n3")
    story.decides()
    start = story.stops().judged("node_lost", "node", node="n3").decides()[0]
    assert isinstance(start.action, StartRanks)
    assert start.action.nodes == ("n1", "n2")
    assert start.action.restore is None


def test_a_smaller_placement_keeps_the_order_of_those_left() -> None:
    story = running(nodes=4, spares=0, policy=policy(min_nodes=2)).loses("n2")
    assert place(story.state) is None
    assert place_smaller(story.state) == ("n1", "n3", "n4")
    assert place_smaller(story.state, frozenset({"n1"})) == ("n3", "n4")
    assert place_smaller(story.state, frozenset({"n1", "n3"})) is None


def test_nothing_is_asked_for_by_a_run_without_allocations() -> None:
    story = Story(policy=REPLACING)
    assert [d.rule for d in decide(story.state, story.now, REPLACING)] == ["launch"]


def test_a_run_grows_onto_nodes_that_stay_and_no_others() -> None:
    story = running(nodes=3, spares=0, policy=policy(min_nodes=2, replace_nodes=True))
    story.stages(5).uploads(5).commits(5).loses("n2")
    story.decides()
    story.stops().judged("node_lost", "node", node="n2").decides()
    (ask,) = story.confirms().steps(6).decides()
    story.says(ev.ActionDone(key=ask.key, ok=True, detail="job-2")).joins("n9", job="job-2")
    drained(story, "n9")
    assert [bare(d.action) for d in story.decides()] == [Launch(nodes=1), GiveBack(job="job-2")]


def test_ranks_that_have_begun_to_finish_are_not_moved() -> None:
    story = drained(running().exits(0), "n2")
    assert [type(d.action) for d in story.decides()] == [Launch]
    story.exits(1, 2, 3).says(ev.AgentWarned(node="n1", signal="USR2", left_s=float("inf")))
    assert story.attempt.is_finished
