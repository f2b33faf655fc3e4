"""An attempt that cannot go on is stopped on all nodes at once."""

from orchestrator.core.actions import Decision, StopRanks
from orchestrator.core.policy import Policy
from orchestrator.core.rules.verdicts import make
from orchestrator.core.state import AttemptPhase, Clue, State


def stop_after_trouble(state: State, now: float, policy: Policy) -> Decision | None:
    """A rank died or hung, or a node is gone: the others cannot finish their step."""
    attempt = state.attempt
    if attempt is None or attempt.first_trouble is None:
        return None
    if attempt.phase not in (AttemptPhase.STARTING, AttemptPhase.RUNNING):
        return None
    clue = attempt.first_trouble
    action = StopRanks(attempt=attempt.number, nodes=attempt.manned)
    reason = f"{describe(clue)}: the other ranks cannot go on without it"
    n = attempt.stop_orders + 1
    return make(state, "rank_or_node_lost", action, reason, (clue.seq,), n)


def stop_after_slow_start(state: State, now: float, policy: Policy) -> Decision | None:
    """Not every agent confirmed its ranks in time."""
    attempt = state.attempt
    if attempt is None or attempt.phase is not AttemptPhase.STARTING:
        return None
    allowed_s = policy.start_timeout_s
    if attempt.restore is not None and attempt.restore.fetches:
        allowed_s += policy.fetch_timeout_s
    if state.waited_s(attempt.ordered_at, now) <= allowed_s:
        return None
    silent = sorted(set(attempt.nodes) - attempt.started_nodes)
    action = StopRanks(attempt=attempt.number, nodes=attempt.manned)
    reason = f"no start confirmed by {', '.join(silent)} within {allowed_s:g} s"
    evidence = (attempt.ordered_seq,)
    return make(state, "slow_start", action, reason, evidence, attempt.stop_orders + 1)


def stop_again(state: State, now: float, policy: Policy) -> Decision | None:
    """An order to stop that brought no end is repeated, and not planned any more."""
    attempt = state.attempt
    if attempt is None or attempt.phase is not AttemptPhase.STOPPING:
        return None
    assert attempt.stop_ordered_at is not None
    saving_s = policy.stop_save_s if attempt.planned_stop and attempt.stop_orders == 1 else 0.0
    allowed_s = saving_s + policy.kill_grace_s + policy.start_timeout_s
    if state.waited_s(attempt.stop_ordered_at, now) <= allowed_s:
        return None
    action = StopRanks(attempt=attempt.number, nodes=attempt.manned)
    names = ", ".join(attempt.manned)
    reason = f"{names} did not end their ranks within {allowed_s:g} s: told again to stop them"
    evidence = (attempt.ordered_seq,)
    return make(state, "stop_again", action, reason, evidence, attempt.stop_orders + 1)


def describe(clue: Clue) -> str:
    """Say in a few words what was seen."""
    match clue.kind:
        case "exit" if clue.code < 0:
            return f"rank {clue.rank} on {clue.node} was ended by signal {-clue.code}"
        case "exit":
            return f"rank {clue.rank} on {clue.node} exited with code {clue.code}"
        case "overdue":
            where = f"rank {clue.rank} on {clue.node}"
            return f"{where} has been in phase {clue.phase} {clue.for_s:.1f} s too long"
        case _:
            return f"{clue.node} is gone ({clue.text})"
