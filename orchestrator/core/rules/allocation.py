"""What becomes of allocations that are held, or of no more use."""

from orchestrator.core.actions import Decision, GiveBack, Unhold
from orchestrator.core.placement import count_good, place
from orchestrator.core.policy import Policy
from orchestrator.core.rules.launch import ENDING_S, FIRST_PAUSE_S, is_coming, is_deserted, unwanted
from orchestrator.core.rules.operator import upload_settled
from orchestrator.core.rules.verdicts import fail, is_pending, make
from orchestrator.core.state import Allocation, AllocationPhase, Node, State

MOST_UNHELD = 3


def unhold(state: State, now: float, policy: Policy) -> Decision | None:
    """A launch failed on some node and Slurm holds the job: let it try again, a few times."""
    found = (a for a in state.allocations if a.phase is AllocationPhase.HELD and not a.given_back)
    held = next(found, None)
    if held is None or is_pending(state, Unhold):
        return None
    if held.unheld_at is not None and state.waited_s(held.unheld_at, now) <= FIRST_PAUSE_S:
        return None  # what is seen may be from before it was let go
    if held.unheld >= MOST_UNHELD:
        if state.attempt is not None and policy.replace_nodes:  # others may be asked for
            reason = f"allocation {held.job} is held after {held.unheld} failed launches"
            return make(state, "unhold", GiveBack(job=held.job), reason, (held.seq,), held.seq)
        reason = f"allocation {held.job} is held after {held.unheld} failed launches: {held.why}"
        return fail(state, "unhold", reason, (held.seq,))
    action = Unhold(job=held.job, exclude=unwanted(state))
    reason = f"allocation {held.job} is held: {held.why}"
    return make(state, "unhold", action, reason, (held.seq,), held.seq)


def give_back(state: State, now: float, policy: Policy) -> Decision | None:
    """An allocation without which the run has all it wants, or whose nodes are all useless."""
    if state.run is None or not policy.replace_nodes:
        return None
    for allocation in state.living_allocations:
        if not allocation.job or allocation.given_back or is_pending(state, GiveBack):
            continue
        if state.is_being_ended(allocation) and not is_deserted(state, allocation, now):
            continue  # by whom is to be known, and it ends without us
        reason = _needless(state, allocation, now) or _useless(state, allocation, now, policy)
        if reason:
            action = GiveBack(job=allocation.job)
            evidence = (allocation.seq,)
            return make(state, "give_back", action, reason, evidence, state.seq)
    return None


def _needless(state: State, allocation: Allocation, now: float) -> str:
    """Say why a waiting allocation, or one that only has idle spares, is not needed."""
    assert state.run is not None
    own = state.members(allocation)
    attempt = state.attempt
    if attempt is None or not attempt.is_live or attempt.first_step_at is None:
        return ""
    if set(own) & set(attempt.nodes) or len(attempt.nodes) < state.run.nodes:
        return ""
    if is_coming(state, allocation, now):
        return ""
    without = count_good(state) - sum(state.nodes[name].is_good for name in own)
    if without < state.run.nodes + state.run.spares:
        return ""
    return f"the run has all {state.run.nodes} nodes and {state.run.spares} spare without it"


def _useless(state: State, allocation: Allocation, now: float, policy: Policy) -> str:
    """Say why nothing can run on an allocation any more, once nothing is lost with it."""
    if not allocation.job or allocation.is_waiting or is_coming(state, allocation, now):
        return ""
    own = state.members(allocation)
    if any(state.nodes[name].is_good for name in own):
        return ""
    if any(_is_just_lost(state, state.nodes[name], now) for name in own):
        return ""  # it may be over, and who ended it is to be told first
    attempt = state.attempt
    if attempt is not None and attempt.is_live:
        if set(own) & set(attempt.manned) or attempt.first_step_at is None:
            return ""
    elif not upload_settled(state, now, policy) or place(state) is not None:
        return ""
    return f"none of its {allocation.nodes} nodes is of use any more"


def _is_just_lost(state: State, node: Node, now: float) -> bool:
    is_lost = not node.alive and node.lost_at is not None
    return is_lost and state.waited_s(node.lost_at or 0.0, now) <= ENDING_S
