"""Getting nodes."""

from orchestrator.core import events as ev
from orchestrator.core.actions import Finish, Launch, Outcome, Wait
from tests.unit.core.story import Story

FAILED = Finish(outcome=Outcome.FAILED)


def test_one_allocation_is_asked_for_spares_included() -> None:
    story = Story(nodes=4, spares=2)
    decision = story.decides_one()
    assert decision.action == Launch(nodes=6)
    assert decision.key == "r/0/launch/1"
    assert story.later(1000).decides() == []


def test_a_refused_allocation_ends_the_run_with_the_launchers_words() -> None:
    story = Story()
    story.done(story.decides_one(), ok=False, detail="invalid partition")
    decision = story.decides_one()
    assert decision.action == FAILED
    assert "invalid partition" in decision.reason


def test_a_lost_allocation_ends_the_run_when_no_agent_is_left() -> None:
    story = Story().running().says(ev.JobObserved(job="job-1", state="gone"))
    assert story.decides() == []
    for name in ("n1", "n2", "n3"):
        story.loses(name)
    decision = story.decides()[-1]
    assert decision.action == FAILED
    assert decision.rule == "allocation_lost"


def test_a_question_without_an_answer_is_no_lost_allocation() -> None:
    story = Story().launched().says(ev.JobObserved(job="job-1", state="unknown"))
    assert isinstance(story.decides_one().action, Wait)


def test_a_run_says_how_many_nodes_it_waits_for() -> None:
    story = Story().launched()
    assert story.decides_one().reason == "waiting for nodes: 0 of 2 are usable"
    assert story.decides() == []
    assert story.joins("n1").decides_one().reason == "waiting for nodes: 1 of 2 are usable"


def test_a_run_without_nodes_gives_up_in_the_end() -> None:
    story = Story().launched().joins("n1").later(120)
    story.decides()
    decision = story.later(0.1).decides_one()
    assert decision.action == FAILED
    assert "1 of 2 nodes usable" in decision.reason


def test_the_time_without_a_supervisor_is_no_lack_of_nodes() -> None:
    story = Story(spares=0).running(step=5).loses("n2")
    story.decides()
    story.stops().judged("node_lost", "node", node="n2").decides()
    story.later(7200).says(ev.LeaseTaken(epoch=2, holder="there"))
    assert story.next() is None
    decision = story.later(121).decides_one()
    assert decision.rule == "no_capacity"
    assert "n2: silent" in decision.reason


def test_a_node_that_comes_back_ends_the_wait() -> None:
    story = Story(spares=0).running(step=5).loses("n2")
    story.decides()
    story.stops().judged("node_lost", "node", node="n2").decides()
    start = story.later(60).joins("n2", incarnation="i2").starts()
    assert getattr(start.action, "nodes", ()) == ("n1", "n2")


def test_a_run_in_the_queue_waits_without_end_and_is_late_only_after_it() -> None:
    queued = ev.JobObserved(job="job-1", state="queued", why="pending, Priority")
    story = Story().launched().says(queued)
    assert story.decides_one().reason == "waiting in the queue: pending, Priority"
    assert story.later(10_000).decides() == []
    story.says(ev.JobObserved(job="job-1", state="running"))
    assert story.decides_one().reason == "waiting for nodes: 0 of 2 are usable"
    assert story.later(119).decides() == []
    assert story.later(2).decides_one().action == FAILED
