"""Restart ladder, levels 1 and 2: same nodes in place, or a spare for a node with evidence."""

from orchestrator.core import budgets
from orchestrator.core.actions import Decision, Restore, Source, StartRanks
from orchestrator.core.placement import place
from orchestrator.core.policy import Policy
from orchestrator.core.restore import choose
from orchestrator.core.rules.verdicts import ended_badly, make
from orchestrator.core.state import Incident, State


def restart(state: State, now: float, policy: Policy) -> Decision | None:
    """Start the next attempt from the newest checkpoint that every rank can get."""
    ended = ended_badly(state)
    if ended is None or state.run is None:
        return None
    attempt, incident = ended
    exclude = node_to_exclude(state, incident, now)
    nodes = place(state, frozenset(exclude))
    if nodes is None and exclude:
        # Better on a suspect node than not at all: no spare is left to take its place.
        exclude, nodes = (), place(state)
    if nodes is None:
        return None
    restore = choose(state, nodes)
    action = StartRanks(
        attempt=attempt.number + 1,
        nodes=nodes,
        ranks_per_node=state.run.ranks_per_node,
        restore=restore,
        interval_steps=state.interval_steps,
        exclude=exclude,
    )
    reason = f"{incident.cause}; {_where(attempt.nodes, nodes)}, {_origin(restore)}"
    rule = "restart_in_place" if nodes == attempt.nodes else "spare_takes_over"
    evidence = (*incident.evidence, attempt.verdict_seq)
    return make(state, rule, action, reason, evidence, action.attempt)


def node_to_exclude(state: State, incident: Incident, now: float) -> tuple[str, ...]:
    """Return the node that gets no more ranks: node evidence, or recurrence on that node."""
    if incident.node is None:
        return ()
    if incident.fault_class == "node" and incident.fault != "node_lost":
        return (incident.node,)
    # A lost node needs no exclusion: it is not usable while it is gone, and may come back.
    if len(budgets.strikes(state, incident.node, now)) >= state.policy.node_strikes:
        return (incident.node,)
    return ()


def _where(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    if before == after:
        return "restart on the same nodes"
    swaps = [
        f"{new} takes the place of {old}"
        for old, new in zip(before, after, strict=True)
        if old != new
    ]
    return " and ".join(swaps)


def _origin(restore: Restore | None) -> str:
    if restore is None:
        return "from step 0 (nothing was saved yet)"
    where = "the nodes' memory" if restore.source is Source.MEMORY else "the store"
    return f"from step {restore.step} in {where}"
