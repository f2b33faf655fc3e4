"""Restart ladder, levels 1 to 3: same nodes, a spare for a node with evidence, a smaller world."""

from dataclasses import dataclass

from monitors.faults import FaultKind
from orchestrator.core import budgets
from orchestrator.core.actions import Decision, Restore, Source, StartRanks
from orchestrator.core.placement import place, place_smaller
from orchestrator.core.policy import Policy
from orchestrator.core.restore import choose, has_history
from orchestrator.core.rules.operator import upload_settled
from orchestrator.core.rules.verdicts import ended_badly, make, wait
from orchestrator.core.state import Attempt, Incident, State

LONGEST_PAUSE_S = 60.0


def restart(state: State, now: float, policy: Policy) -> Decision | None:
    """Start the next attempt from the newest checkpoint that every rank can get."""
    ended = ended_badly(state)
    if ended is None or state.run is None:
        return None
    attempt, incident = ended
    plan = next_attempt(state, incident, now)
    if plan is None or (plan.restore is None and has_history(state)):
        return None
    if attempt.moved and not _is_newest(plan, attempt) and not upload_settled(state, now, policy):
        return wait(state, "restart", "waiting for the upload of what the ranks saved last")
    if (why := _store_away(state, attempt, incident, plan, now)) is not None:
        return wait(state, "restart", why)
    action = StartRanks(
        attempt=attempt.number + 1,
        nodes=plan.nodes,
        ranks_per_node=state.run.ranks_per_node,
        restore=plan.restore,
        interval_steps=state.interval_steps,
        exclude=plan.exclude,
    )
    reason = (
        f"{incident.cause}; {_where(attempt.nodes, plan.nodes)}, {_origin(state, plan.restore)}"
    )
    rule = _rule(attempt.nodes, plan.nodes)
    evidence = (*incident.evidence, attempt.verdict_seq)
    return make(state, rule, action, reason, evidence, action.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the next attempt runs, what it starts from (None: step 0), whom it excludes."""

    nodes: tuple[str, ...]
    restore: Restore | None
    exclude: tuple[str, ...]


def next_attempt(state: State, incident: Incident, now: float) -> Plan | None:
    """Return the plan after `incident`, or None when too few nodes are usable.

    Better on a suspect node than not at all (no spare is left to take its place), and better there
    than from step 0 (only its memory still holds what can be restored).
    """
    exclude = node_to_exclude(state, incident, now)
    nodes = place(state, frozenset(exclude))
    if nodes is not None:
        restore = choose(state, nodes)
        if restore is not None or not exclude or not has_history(state):
            return Plan(nodes=nodes, restore=restore, exclude=exclude)
    nodes = place(state) or place_smaller(state)
    if nodes is None:
        return None
    return Plan(nodes=nodes, restore=choose(state, nodes), exclude=())


def _store_away(
    state: State, attempt: Attempt, incident: Incident, plan: Plan, now: float
) -> str | None:
    """Say why the store is not read yet after it did not answer the ranks; None when it is.

    It has to answer here first, and then it is asked the later the more often it was away.
    """
    if plan.restore is None or plan.restore.source is not Source.STORE:
        return None
    if not state.catalogue_read:
        return f"waiting for the store: {state.catalogue_problem}"
    if incident.fault != FaultKind.STORE_AWAY:
        return None
    pause_s = min(LONGEST_PAUSE_S, 2.0 ** budgets.same_root_streak(state))
    if now - (attempt.over_at or now) >= pause_s:
        return None
    return f"the store was away: the ranks ask it again {pause_s:g} s after they ended"


def _is_newest(plan: Plan, attempt: Attempt) -> bool:
    """Whether the plan starts from the last step that the attempt made."""
    return plan.restore is not None and plan.restore.step >= attempt.max_step


def node_to_exclude(state: State, incident: Incident, now: float) -> tuple[str, ...]:
    """Return the node that gets no more ranks: node evidence, or recurrence on that node.

    None once many were excluded lately: then the fault is hardly theirs, and a person must look.
    """
    if incident.node is None or state.excluded_lately >= state.policy.exclusion_limit:
        return ()
    if incident.fault_class == "node" and incident.fault != "node_lost":
        return (incident.node,)
    # A lost node needs no exclusion: it is not usable while it is gone, and may come back.
    if len(budgets.strikes(state, incident.node, now)) >= state.policy.node_strikes:
        return (incident.node,)
    return ()


def _rule(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    if before == after:
        return "restart_in_place"
    if len(before) == len(after):
        return "spare_takes_over"
    return "shrink" if len(after) < len(before) else "grow"


def _where(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    if before == after:
        return "restart on the same nodes"
    if len(before) != len(after):
        return f"go on with {len(after)} nodes instead of {len(before)}"
    swaps = [
        f"{new} takes the place of {old}"
        for old, new in zip(before, after, strict=True)
        if old != new
    ]
    return " and ".join(swaps)


def _origin(state: State, restore: Restore | None) -> str:
    if restore is None and state.saves:
        return "from step 0 (what was saved was in memory that is gone)"
    if restore is None:
        return "from step 0 (nothing was saved yet)"
    return f"from step {restore.step} in {restore.source.words}"
