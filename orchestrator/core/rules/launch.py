"""Getting nodes: one allocation for the whole run, spares included."""

from orchestrator.core.actions import Decision, Launch
from orchestrator.core.placement import count_usable, place
from orchestrator.core.policy import Policy
from orchestrator.core.rules.verdicts import fail, is_pending, make, wait
from orchestrator.core.state import State


def launch(state: State, now: float, policy: Policy) -> Decision | None:
    """Ask for the allocation once."""
    if state.launched_at is not None or state.run is None:
        return None
    nodes = state.run.nodes + state.run.spares
    reason = f"{state.run.nodes} nodes and {state.run.spares} spare, in one allocation"
    return make(state, "launch", Launch(nodes=nodes), reason, (), 1)


def allocation_refused(state: State, now: float, policy: Policy) -> Decision | None:
    """The launcher said no."""
    if state.job_state != "refused":
        return None
    reason = f"the launcher refused the allocation: {state.job_why}"
    return fail(state, "allocation_refused", reason, (state.job_seq,))


def allocation_lost(state: State, now: float, policy: Policy) -> Decision | None:
    """The allocation is gone and no agent is left."""
    if state.job_state != "gone" or any(n.alive for n in state.nodes.values()):
        return None
    if state.attempt is not None and state.attempt.is_live:
        return None
    reason = f"allocation {state.job} is gone and no agent is left"
    return fail(state, "allocation_lost", reason, (state.job_seq,))


def no_capacity(state: State, now: float, policy: Policy) -> Decision | None:
    """Too few nodes for an attempt: wait for more, then give up."""
    if state.run is None or state.launched_at is None or is_pending(state, Launch):
        return None
    if state.attempt is not None and state.attempt.is_live:
        return None
    if place(state) is not None:
        return None
    if state.job_state == "queued":
        return wait(state, "no_capacity", f"waiting in the queue: {state.job_why}")
    have, need = count_usable(state), state.run.nodes
    over_at = state.attempt.over_at if state.attempt else None
    since = max(state.launched_at, state.nodes_given_at or 0.0, over_at or 0.0)
    if state.waited_s(since, now) > policy.launch_timeout_s:
        lost = [f"{n.name}: {n.excluded or n.lost_why}" for n in state.nodes.values()]
        named = "; ".join(text for text in lost if not text.endswith(": "))
        reason = f"no capacity: {have} of {need} nodes usable for {policy.launch_timeout_s:g} s"
        return fail(state, "no_capacity", f"{reason} ({named})" if named else reason, ())
    return wait(state, "no_capacity", f"waiting for nodes: {have} of {need} are usable")
