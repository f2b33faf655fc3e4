"""What a node did to this run is written down for all runs."""

from orchestrator.core.actions import Decision, NoteNode
from orchestrator.core.policy import Policy
from orchestrator.core.rules.restart import next_attempt
from orchestrator.core.rules.verdicts import ended_badly, make
from orchestrator.core.state import State

NOTED_CLASSES = ("process", "node")


def note(state: State, now: float, policy: Policy) -> Decision | None:
    """Note an incident that is blamed on a node, before the run goes on or ends over it."""
    ended = ended_badly(state)
    if ended is None:
        return None
    attempt, incident = ended
    if incident.node is None or incident.number <= state.noted:
        return None
    if incident.fault_class not in NOTED_CLASSES:
        return None
    plan = next_attempt(state, incident, now)
    is_excluded = plan is not None and incident.node in plan.exclude
    action = NoteNode(
        node=incident.node,
        incident=incident.number,
        fault=incident.fault,
        cause=incident.cause,
        excluded_s=policy.exclude_s if is_excluded else 0.0,
    )
    reason = f"incident {incident.number} is blamed on {incident.node}: {incident.cause}"
    evidence = (attempt.verdict_seq,)
    return make(state, "ledger", action, reason, evidence, incident.number)
