"""Asking for further nodes, and giving back those of no use."""

from orchestrator.core import events as ev
from orchestrator.core.actions import Finish, GiveBack, Launch, Outcome, StartRanks
from orchestrator.core.events import Ending
from orchestrator.core.node import AllocationPhase
from orchestrator.core.rules.launch import LONGEST_PAUSE_S, MOST_FRUITLESS
from tests.unit.core.story import Story, bare, policy

REPLACING = policy(replace_nodes=True)


def running(**more: int) -> Story:
    """Two nodes and a spare of one allocation that train, agents that say where they belong."""
    story = Story(policy=REPLACING, **more).launched()
    story.joins(*(f"n{k + 1}" for k in range(story.nodes + story.spares)), job="job-1")
    story.says(ev.CatalogueRead(commits=()))
    story.starts()
    return story.steps(5)


def launches(story: Story) -> list[int]:
    """How many nodes each request asks for that is made now."""
    return [d.action.nodes for d in story.decides() if isinstance(d.action, Launch)]


def lost(story: Story, *names: str) -> Story:
    """Nodes are gone, and the attempt goes on where it can."""
    for name in names:
        story.loses(name)
    story.decides()
    return story.stops().judged("node_lost", "node", node=names[0])


def recovered(story: Story, *names: str) -> Story:
    """The nodes are gone, a spare has taken over, and the replacement has been asked for."""
    lost(story, *names).decides()
    story.confirms().steps(6).decides()
    return story


def gives(story: Story, job: str) -> Story:
    """The launcher takes the newest request under this number."""
    return story.says(ev.ActionDone(key=story.state.allocations[-1].key, ok=True, detail=job))


def test_a_replacement_is_asked_for_when_the_spare_has_taken_over() -> None:
    story = lost(running(), "n2")
    assert [type(d.action) for d in story.decides()] == [StartRanks]
    assert launches(story.confirms()) == []
    (ask,) = story.steps(6).decides()
    assert ask.action == Launch(nodes=1, exclude=("n1", "n3"))
    assert ask.reason == "1 of 3 nodes are missing: n2 (silent)"


def test_a_script_that_tells_nothing_gets_its_replacement_a_while_later() -> None:
    story = lost(running(), "n2")
    story.decides()
    assert launches(story.confirms().later(119)) == []
    assert launches(story.later(2)) == [1]


def test_nodes_are_asked_for_once_and_join_the_same_pool() -> None:
    story = recovered(running(), "n2")
    assert launches(story) == []
    gives(story, "job-2")
    assert launches(story) == []
    story.joins("n9", job="job-2")
    assert story.decides() == []
    assert story.state.nodes["n9"].is_good


def test_a_run_that_does_not_replace_nodes_asks_for_none() -> None:
    story = Story().running(step=5)
    assert launches(lost(story, "n2")) == []


def test_excluded_nodes_are_not_asked_for_again() -> None:
    story = running().says(ev.LedgerRead(excluded={"n7": "run x: fan"}, excluded_lately=1))
    story.exits(0, code=-9)
    story.decides()
    story.stops().judged("gpu", "node", node="n1").decides()
    (ask,) = story.confirms().steps(6).decides()
    assert ask.action == Launch(nodes=1, exclude=("n1", "n2", "n3", "n7"))


def test_the_first_allocation_leaves_out_what_the_ledger_excludes() -> None:
    story = Story().says(ev.LedgerRead(excluded={"n7": "fan"}, excluded_lately=0))
    assert story.decides_one().action == Launch(nodes=3, exclude=("n7",))


def test_a_request_that_brings_nothing_is_repeated_later_and_later_and_not_for_ever() -> None:
    story = lost(running(spares=0), "n2")
    pauses: list[float] = []
    for n in range(MOST_FRUITLESS):
        asked_at = story.now
        for _ in range(10_000):
            if launches(story):
                break
            story.later(1.0)
        pauses.append(story.now - asked_at)
        assert not story.state.outcome
        key = story.state.allocations[-1].key
        story.says(ev.ActionDone(key=key, ok=False, detail=f"no node {n}"))
    assert pauses == [0.0, 15.0, 30.0, 60.0, 120.0]
    story.later(121)
    (end,) = story.decides()
    assert end.action == Finish(outcome=Outcome.FAILED)
    assert launches(story.later(10_000)) == []


def test_an_attempt_that_steps_forgives_the_requests_that_brought_nothing() -> None:
    story = recovered(running(), "n2")
    story.says(ev.ActionDone(key=story.state.allocations[-1].key, ok=False, detail="no"))
    assert launches(story.later(1)) == []
    story.exits(0, code=-9)
    story.decides()
    story.stops().judged().decides()
    assert launches(story.later(1).confirms().steps(7)) == [1]


def test_a_lost_allocation_is_asked_for_again() -> None:
    story = lost(running(), "n1", "n2", "n3")
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.FAILED))
    assert story.decides() == []
    assert story.state.allocations[-1].nodes == 3
    gives(story, "job-2").joins("n1", "n2", "n3", incarnation="i2", job="job-2")
    start = story.decides()[0]
    assert isinstance(start.action, StartRanks)
    assert start.action.attempt == 2


def test_who_ends_an_allocation_is_known_before_another_is_asked_for() -> None:
    story = running()
    for name in ("n1", "n2", "n3"):
        story.says(ev.AgentWarned(node=name, signal="TERM", left_s=25.0))
    (stop,) = story.decides()
    assert (stop.rule, stop.action.moved) == ("move", "allocation_ended")  # type: ignore[union-attr]
    story.exits(0, 1, 2, 3).judged("allocation_ended", "free")
    assert launches(story) == []
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.UNKNOWN))
    assert launches(story) == []
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.PREEMPTED))
    assert story.incident.fault == "preempted"
    assert "preempted" in story.incident.cause
    assert launches(story.later(4)) == [3]


def test_who_is_preempted_before_any_step_asks_later_and_later_and_never_gives_up() -> None:
    story = running()
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.PREEMPTED))
    lost(story, "n1", "n2", "n3")
    assert len(story.state.allocations) == 2  # the next was asked for at once
    pauses = []
    for number in range(2, 14):
        gives(story, f"job-{number}")
        story.says(ev.JobObserved(job=f"job-{number}", state="gone", ending=Ending.PREEMPTED))
        pause = 0
        while not (asked := launches(story)):
            story.later(15)
            pause += 15
        assert asked == [3]
        pauses.append(pause)
    assert pauses[:4] == [15, 30, 60, 120]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S


def test_an_end_that_nobody_explains_is_taken_for_none_of_a_person_in_the_end() -> None:
    story = running()
    for name in ("n1", "n2", "n3"):
        story.says(ev.AgentWarned(node=name, signal="TERM", left_s=25.0))
    story.decides()
    story.exits(0, 1, 2, 3).judged("allocation_ended", "free")
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.UNKNOWN))
    assert launches(story.later(89)) == []
    assert launches(story.later(2)) == [3]


def test_a_persons_scancel_stops_the_run_for_good() -> None:
    story = running()
    for name in ("n1", "n2", "n3"):
        story.says(ev.AgentWarned(node=name, signal="TERM", left_s=25.0))
    story.decides()
    story.exits(0, 1, 2, 3).judged("allocation_ended", "free")
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.CANCELLED))
    end = story.decides_one()
    assert end.action == Finish(outcome=Outcome.STOPPED)
    assert "job-1 was cancelled by a person" in end.reason


def test_a_cancelled_request_that_never_had_nodes_stops_nothing() -> None:
    story = recovered(running(), "n2")
    gives(story, "job-2").says(ev.JobObserved(job="job-2", state="queued", why="Priority"))
    story.says(ev.JobObserved(job="job-2", state="gone", ending=Ending.CANCELLED))
    assert story.decides() == []
    assert launches(story.later(16)) == [1]


def test_the_first_request_is_the_run_and_who_cancels_it_stops_the_run() -> None:
    story = Story(policy=REPLACING).launched()
    story.says(ev.JobObserved(job="job-1", state="queued", why="Priority"))
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.CANCELLED))
    assert story.decides_one().action == Finish(outcome=Outcome.STOPPED)


def test_a_scancel_that_no_agent_had_time_to_tell_of_stops_the_run_as_well() -> None:
    story = lost(running(), "n1", "n2", "n3")
    assert not any(isinstance(d.action, GiveBack) for d in story.decides())
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.CANCELLED))
    assert story.decides()[-1].action == Finish(outcome=Outcome.STOPPED)


def test_an_allocation_whose_agents_are_all_gone_is_given_back_in_the_end() -> None:
    story = lost(running(), "n1", "n2", "n3")
    story.decides()
    assert GiveBack(job="job-1") in [d.action for d in story.later(91).decides()]


def test_an_end_that_is_known_is_not_forgotten() -> None:
    story = running().says(ev.JobObserved(job="job-1", state="gone", ending=Ending.CANCELLED))
    story.says(ev.JobObserved(job="job-1", state="running"))
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.UNKNOWN))
    assert story.state.allocations[0].ending is Ending.CANCELLED


def test_nodes_on_which_no_agent_ever_starts_are_given_back() -> None:
    story = gives(recovered(running(), "n2"), "job-2")
    assert story.later(120).decides() == []
    again, back = story.later(1).decides()
    assert (bare(again.action), back.action) == (Launch(nodes=1), GiveBack(job="job-2"))


def test_requests_whose_agents_never_come_are_not_made_for_ever() -> None:
    story = recovered(running(), "n2")
    for _ in range(200):
        newest = story.state.allocations[-1]
        if newest.phase is AllocationPhase.ASKED:
            gives(story, f"job-{len(story.state.allocations)}")
        for decision in story.later(20).decides():
            if isinstance(decision.action, GiveBack):
                story.done(decision)
    assert len(story.state.allocations) == 1 + MOST_FRUITLESS
    assert all(a.given_back for a in story.state.allocations[1:])
    assert not story.state.outcome


def test_spares_that_served_for_a_while_are_no_requests_that_brought_nothing() -> None:
    story = recovered(running(), "n2")
    for n in range(2, 2 + 2 * MOST_FRUITLESS):
        gives(story, f"job-{n}").joins(f"n{n + 8}", job=f"job-{n}")
        assert story.later(3600).decides() == []
        story.says(ev.JobObserved(job=f"job-{n}", state="gone", ending=Ending.FAILED))
        assert launches(story.loses(f"n{n + 8}")) == [1]


def test_a_spare_that_goes_as_soon_as_it_came_brought_nothing() -> None:
    story = gives(recovered(running(), "n2"), "job-2").joins("n9", job="job-2")
    story.later(5).says(ev.JobObserved(job="job-2", state="gone", ending=Ending.FAILED))
    assert launches(story.loses("n9")) == []
    assert launches(story.later(16)) == [1]


def test_time_limits_within_which_no_step_is_made_are_not_met_for_ever() -> None:
    story = Story(policy=REPLACING)
    for n in range(1, 1 + MOST_FRUITLESS):
        for _ in range(100):
            if story.later(10).decides() and story.state.allocations[-1].job == "":
                break
        gives(story, f"job-{n}").joins("n1", "n2", "n3", incarnation=f"i{n}", job=f"job-{n}")
        ended = ev.JobObserved(job=f"job-{n}", state="gone", ending=Ending.TIME_LIMIT)
        story.later(3600).says(ended).loses("n1").loses("n2").loses("n3")
    end = story.later(1000).decides()[-1]
    assert end.action == Finish(outcome=Outcome.FAILED)


def test_a_request_that_is_not_needed_any_more_is_taken_back() -> None:
    story = recovered(running(), "n2")
    gives(story, "job-2").says(ev.JobObserved(job="job-2", state="queued", why="Priority"))
    assert story.decides() == []
    story.joins("n2", incarnation="i2", job="job-1")
    back = story.decides_one()
    assert back.action == GiveBack(job="job-2")
    story.done(back, detail="job-2")
    story.says(ev.JobObserved(job="job-2", state="gone", ending=Ending.CANCELLED))
    assert story.decides() == []
    assert not story.state.outcome


def test_an_allocation_is_kept_while_any_of_its_nodes_is_in_use() -> None:
    story = recovered(running(), "n2")
    gives(story, "job-2").joins("n9", job="job-2")
    story.joins("n2", incarnation="i2", job="job-1")  # four good nodes, three wanted
    assert story.decides_one().action == GiveBack(job="job-2")
    assert not story.state.nodes["n9"].is_usable
    assert story.state.allocations[0].phase is AllocationPhase.RUNNING


def test_nodes_that_are_given_back_get_no_ranks() -> None:
    story = recovered(running(), "n2")
    gives(story, "job-2").joins("n9", job="job-2")
    story.joins("n2", incarnation="i2", job="job-1").decides()
    story.loses("n1")
    story.decides()
    start = story.stops().judged("node_lost", "node", node="n1").decides()[0]
    assert isinstance(start.action, StartRanks)
    assert start.action.nodes == ("n2", "n3")


def test_an_allocation_whose_agents_alone_were_told_to_end_is_given_back_and_replaced() -> None:
    story = gives(recovered(running(), "n2"), "job-2").joins("n9", job="job-2")
    story.says(ev.AgentWarned(node="n9", signal="TERM", left_s=25.0)).later(25).loses("n9")
    assert story.later(89).decides() == []
    again, back = story.later(2).decides()
    assert (again.action.nodes, back.action) == (1, GiveBack(job="job-2"))  # type: ignore[union-attr]


def test_an_allocation_is_not_given_back_while_its_agents_go() -> None:
    story = running(spares=0).says(ev.LedgerRead(excluded={"n1": "fan"}, excluded_lately=0))
    lost(story, "n2")
    assert not any(isinstance(d.action, GiveBack) for d in story.decides())
    assert GiveBack(job="job-1") in [d.action for d in story.later(91).decides()]


def test_an_ending_that_is_told_before_the_verdict_explains_it_as_well() -> None:
    story = running()
    for name in ("n1", "n2", "n3"):
        story.says(ev.AgentWarned(node=name, signal="TERM", left_s=25.0))
    story.decides()
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.PREEMPTED))
    story.loses("n1").loses("n2").judged("allocation_ended", "free")
    assert (story.incident.fault, story.incident.cause) == (
        "preempted",
        "allocation job-1 was preempted",
    )


def test_nodes_that_are_lost_with_a_preempted_allocation_are_not_to_blame() -> None:
    story = running()
    story.says(ev.JobObserved(job="job-1", state="gone", ending=Ending.PREEMPTED))
    lost(story, "n1", "n2", "n3")
    assert (story.incident.fault, story.incident.fault_class) == ("preempted", "free")
    assert story.incident.node is None
    story.decides()
    assert story.notes == []


def test_a_preemption_that_is_told_late_is_not_charged_either() -> None:
    story = lost(running(), "n1", "n2", "n3")
    story.decides()
    assert story.incident.fault == "node_lost"
    story.later(5).says(ev.JobObserved(job="job-1", state="gone", ending=Ending.PREEMPTED))
    assert (story.incident.fault, story.incident.fault_class) == ("preempted", "free")


def test_a_node_that_was_lost_long_before_its_allocation_ended_was_lost() -> None:
    story = lost(running(spares=0), "n2")
    story.decides()
    story.later(91).says(ev.JobObserved(job="job-1", state="gone", ending=Ending.TIME_LIMIT))
    assert story.incident.fault == "node_lost"


def test_nothing_is_asked_for_until_all_of_a_warned_allocation_have_spoken() -> None:
    story = running().says(ev.AgentWarned(node="n3", signal="TERM", left_s=25.0))
    assert story.decides() == []
    story.later(0.1).says(ev.AgentWarned(node="n1", signal="TERM", left_s=25.0))
    story.says(ev.AgentWarned(node="n2", signal="TERM", left_s=25.0))
    assert launches(story) == []
    assert launches(story.later(60)) == []


def test_one_agent_that_is_told_to_end_is_replaced_a_moment_later() -> None:
    story = running().says(ev.AgentWarned(node="n3", signal="TERM", left_s=25.0))
    assert launches(story.later(2.9)) == []
    assert launches(story.later(0.2)) == [1]
