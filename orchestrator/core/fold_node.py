"""How facts about nodes and their agents change the state."""

from dataclasses import replace

from orchestrator.core import events as ev
from orchestrator.core import fold_allocation as allocations
from orchestrator.core import fold_attempt as attempts
from orchestrator.core.events import DISK, Replica
from orchestrator.core.node import Node
from orchestrator.core.record import Record
from orchestrator.core.state import State


def joined(state: State, record: Record, event: ev.AgentJoined) -> State:
    """An agent said hello."""
    before = state.nodes.get(event.node)
    if state.is_fenced(event.node, event.incarnation):
        return state
    former = before.former if before else frozenset()
    warned = copy_problem = ""
    if before is not None and before.incarnation == event.incarnation:
        if event.attempt and not before.alive:
            return state  # lost, and its ranks still run
        warned, copy_problem = before.warned, before.copy_problem
    elif before is not None:
        former |= {before.incarnation}
        why = "its agent was replaced by a new one"
        state = attempts.lose_node(state, record, event.node, why, since_s=0.0)
    in_ledger = event.node in state.ledger
    excluded = before.excluded if before else ""
    node = Node(
        name=event.node,
        incarnation=event.incarnation,
        alive=True,
        address=event.address,
        metrics_url=event.metrics_url,
        joined_seq=record.seq,
        job=event.job,
        unfit=event.unfit,
        excluded=state.ledger.get(event.node, excluded),
        in_ledger=in_ledger,
        leaving=before.leaving if before else "",
        warned=warned,
        given_back=any(a.given_back for a in state.allocations if a.job and a.job == event.job),
        former=former,
        staged=event.staged,
        replicas=event.replicas,
        replica_address=event.replica_address,
        copy_problem=copy_problem,
        shelf=_shelf(before, event.replica_address, event.replicas),
    )
    state = attempts.unpair(state, event.node)
    return allocations.joined(with_node(state, node), event.job)


def lost(state: State, record: Record, event: ev.AgentLost) -> State:
    """An agent is gone, and what its node held in memory with it."""
    node = state.nodes.get(event.node)
    if node is None or node.incarnation != event.incarnation or not node.alive:
        return state
    gone = replace(node, alive=False, lost_why=event.why, lost_at=record.at, staged=())
    state = with_node(state, replace(gone, replicas=(), replica_address=""))
    return attempts.lose_node(state, record, event.node, event.why, event.silent_s)


def warned(state: State, record: Record, event: ev.AgentWarned) -> State:
    """An agent was told that it must end; TERM says more than USR2."""
    node = state.nodes.get(event.node)
    if node is None or node.warned == "TERM":
        return state
    return with_node(state, replace(node, warned=event.signal, warned_at=record.at))


def leaving(state: State, record: Record, event: ev.NodeLeaving) -> State:
    """The site wants a node back, or does not any more."""
    node = state.nodes.get(event.node)
    return state if node is None else with_node(state, replace(node, leaving=event.why))


def ledger_read(state: State, record: Record, event: ev.LedgerRead) -> State:
    """What the ledger excludes is excluded; what it excluded and does not any more is not."""

    def again(node: Node) -> Node:
        if node.name in event.excluded:
            return replace(node, excluded=event.excluded[node.name], in_ledger=True)
        return replace(node, excluded="", in_ledger=False) if node.in_ledger else node

    return replace(
        state,
        nodes={name: again(node) for name, node in state.nodes.items()},
        ledger=event.excluded,
        excluded_lately=event.excluded_lately,
    )


def staged(state: State, record: Record, event: ev.Staged) -> State:
    """What lies in a living node's memory."""
    node = state.nodes.get(event.node)
    if node is None or not node.alive:
        return state
    return with_node(state, replace(node, staged=event.shards))


def replicated(state: State, record: Record, event: ev.Replicated) -> State:
    """What a living node keeps of copies."""
    node = state.nodes.get(event.node)
    if node is None or not node.alive:
        return state
    return with_node(
        state,
        replace(
            node,
            replicas=event.replicas,
            replica_address=event.address,
            copy_problem=event.problem,
            shelf=_shelf(node, event.address, event.replicas),
        ),
    )


def _shelf(before: Node | None, address: str, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
    """Return what is on a node's disk; who gives no copies now has not looked."""
    if address:
        return tuple(copy for copy in replicas if copy.tier == DISK)
    return before.shelf if before is not None else ()


def with_node(state: State, node: Node) -> State:
    """Return the state with a node added or replaced."""
    return replace(state, nodes={**state.nodes, node.name: node})
