from dataclasses import replace
from typing import Any

from orchestrator.core import events as ev
from orchestrator.core.events import Ending
from orchestrator.core.node import Allocation as Known
from orchestrator.core.node import AllocationPhase, Node
from orchestrator.core.state import State
from orchestrator.launch.launcher import Allocation
from orchestrator.supervisor.allocations import changes, needs_a_fresh_look


def node(name: str, **more: Any) -> Node:
    made = Node(name=name, incarnation="i1", alive=True, address="", metrics_url="", joined_seq=1)
    return replace(made, **more)


def known(**more: Any) -> Known:
    made = Known(key="k", nodes=3, asked_at=0.0, seq=1, job="7", phase=AllocationPhase.RUNNING)
    return replace(made, **more)


def running(*nodes: Node, **allocation: Any) -> State:
    named = nodes or tuple(node(f"n{k}") for k in range(3))
    return State(allocations=(known(**allocation),), nodes={n.name: n for n in named})


def seen(**nodes: bool) -> Allocation:
    return Allocation(job="7", running=True, nodes=nodes)


def told(state: State, said: Allocation, *connected: str, **silent_s: float) -> list[ev.Event]:
    return list(changes(state, said, frozenset(connected), silent_s))


def test_a_node_whose_agent_is_gone_is_lost_at_once() -> None:
    (lost,) = told(running(), seen(n0=True, n1=False, n2=True), n1=0.2)
    assert isinstance(lost, ev.AgentLost)
    assert (lost.node, lost.incarnation, lost.silent_s) == ("n1", "i1", 0.2)
    assert "gone" in lost.why


def test_a_connected_agent_is_not_gone_whatever_the_launcher_says() -> None:
    assert not told(running(), seen(n0=True, n1=False), "n1")


def test_a_node_that_the_launcher_cannot_tell_about_is_not_gone() -> None:
    assert not told(running(), seen(n0=True))


def test_nodes_that_never_joined_or_are_lost_already_are_no_news() -> None:
    assert not told(running(node("n0", alive=False)), seen(n0=False, n9=False, n1=True))


def test_a_node_that_another_allocation_has_now_is_not_lost_by_this_one() -> None:
    assert not told(running(node("n0", job="8")), seen(n0=False))
    assert told(running(node("n0", job="7")), seen(n0=False))


def test_an_allocation_in_the_queue_is_told_with_its_reason_and_once() -> None:
    waits = replace(seen(), queued="pending, Priority")
    expected = ev.JobObserved(job="7", state="queued", why="pending, Priority")
    assert told(running(), waits) == [expected]
    queued = running(phase=AllocationPhase.QUEUED, why="pending, Priority")
    assert not told(queued, waits)
    assert told(queued, seen()) == [ev.JobObserved(job="7", state="running")]


def test_an_allocation_that_is_held_is_told_as_such() -> None:
    held = replace(seen(), queued="launch failed requeued held", held=True)
    expected = ev.JobObserved(job="7", state="held", why="launch failed requeued held")
    assert told(running(), held) == [expected]
    assert not told(running(phase=AllocationPhase.HELD, why=held.queued), held)


def test_an_end_is_told_once_and_again_when_its_reason_is_known() -> None:
    gone = Allocation(job="7", running=False, nodes={}, ending=Ending.UNKNOWN)
    assert told(running(), gone) == [ev.JobObserved(job="7", state="gone", ending=Ending.UNKNOWN)]
    over = {"phase": AllocationPhase.GONE, "ending": Ending.UNKNOWN}
    assert not told(running(**over), gone)
    cancelled = replace(gone, ending=Ending.CANCELLED)
    expected = ev.JobObserved(job="7", state="gone", ending=Ending.CANCELLED)
    assert told(running(**over), cancelled) == [expected]
    assert not told(running(**{**over, "ending": Ending.CANCELLED}), gone)
    assert not told(running(), replace(gone, job="8"))


def test_nodes_that_are_wanted_back_are_told_and_when_they_are_not_any_more() -> None:
    drained = replace(seen(), leaving={"n1": "DRAIN: bad fan", "n9": "DRAIN"})
    expected = ev.NodeLeaving(node="n1", why="DRAIN: bad fan")
    assert told(running(), drained) == [expected]
    leaving = running(node("n1", leaving="DRAIN: bad fan", job="7"))
    assert not told(leaving, drained)
    assert told(leaving, seen()) == [ev.NodeLeaving(node="n1", why="")]
    elsewhere = running(node("n1", leaving="DRAIN", job="8"))
    assert not told(elsewhere, seen())


def test_only_an_end_by_signal_needs_to_be_known_at_once() -> None:
    def fresh(*nodes: Node, **allocation: Any) -> bool:
        state = running(*nodes, **allocation)
        return needs_a_fresh_look(state, state.allocations[0])

    told = node("n0", job="7", warned="TERM")
    assert fresh(told, node("n1", job="7", alive=False), node("n2", job="8"))
    assert not fresh(told, node("n1", job="7"))  # one agent alone: by anybody
    assert not fresh(node("n0", job="7", warned="USR2"))
    over = {"phase": AllocationPhase.GONE, "ending": Ending.UNKNOWN}
    assert fresh(told, **over)
    assert not fresh(told, **{**over, "ending": Ending.PREEMPTED})
