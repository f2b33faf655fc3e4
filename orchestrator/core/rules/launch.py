"""Getting nodes: one allocation for the run and its spares, further ones for what is missing."""

import math

from orchestrator.core.actions import Decision, Launch
from orchestrator.core.events import Ending
from orchestrator.core.node import Allocation, AllocationPhase, Node
from orchestrator.core.placement import count_good, count_usable, place, place_smaller
from orchestrator.core.policy import Policy
from orchestrator.core.restore import choose, has_history
from orchestrator.core.rules.verdicts import fail, is_pending, make, wait
from orchestrator.core.state import AttemptPhase, State

FIRST_PAUSE_S = 15.0
LONGEST_PAUSE_S = 3600.0
MOST_FRUITLESS = 5
ENDING_S = 90.0
WARNING_S = 3.0
SETTLED_S = 120.0


def launch(state: State, now: float, policy: Policy) -> Decision | None:
    """Ask for the first allocation."""
    if state.allocations or state.run is None:
        return None
    nodes = state.run.nodes + state.run.spares
    reason = f"{state.run.nodes} nodes and {state.run.spares} spare, in one allocation"
    action = Launch(nodes=nodes, exclude=tuple(sorted(state.ledger)))
    return make(state, "launch", action, reason, (), 1)


def allocation_refused(state: State, now: float, policy: Policy) -> Decision | None:
    """The launcher said no to the first allocation: the request itself is wrong."""
    if len(state.allocations) != 1 or state.allocations[0].phase is not AllocationPhase.REFUSED:
        return None
    first = state.allocations[0]
    reason = f"the launcher refused the allocation: {first.why}"
    return fail(state, "allocation_refused", reason, (first.seq,))


def allocation_lost(state: State, now: float, policy: Policy) -> Decision | None:
    """All allocations are gone, no agent is left, and no further one may be asked for."""
    if not state.allocations or state.living_allocations:
        return None
    if any(n.alive for n in state.nodes.values()):
        return None
    if state.attempt is not None and state.attempt.is_live:
        return None
    last = state.allocations[-1]
    reason = f"allocation {last.job} is gone and no agent is left"
    if policy.replace_nodes:
        lost = fruitless(state, now)
        if len(lost) < MOST_FRUITLESS:
            return None
        reason = f"{len(lost)} allocations in a row ended before a step was made"
        reason += f"; the last: {last.why}" if last.why else ""
    return fail(state, "allocation_lost", reason, (last.seq,))


def replace(state: State, now: float, policy: Policy) -> Decision | None:
    """Ask for as many nodes as are missing; the run goes on meanwhile as well as it can."""
    if not policy.replace_nodes or not state.allocations or state.run is None:
        return None
    missing = state.run.nodes + state.run.spares - count_good(state) - coming(state, now)
    if missing <= 0 or is_pending(state, Launch):
        return None
    if _is_recovering(state, now) or _is_ending_unknown(state, now):
        return None
    if any(state.waited_s(n.warned_at, now) < WARNING_S for n in state.nodes.values() if n.warned):
        return None  # the others of its allocation may be about to say the same
    if now < _next_request_at(state, now):
        return None
    reason = f"{missing} of {state.run.nodes + state.run.spares} nodes are missing: {gone(state)}"
    action = Launch(nodes=missing, exclude=unwanted(state))
    evidence = tuple(sorted({a.seq for a in state.allocations[-1:]}))
    return make(state, "replace", action, reason, evidence, state.seq)


def unwanted(state: State) -> tuple[str, ...]:
    """Return the nodes that a further allocation must not have.

    Those that cannot be used, and those that the run has and keeps: a node that is shared between
    jobs would otherwise be given a second time.
    """
    barred = (n.name for n in state.nodes.values() if n.excluded or (n.alive and n.unfit))
    kept = (n.name for n in state.nodes.values() if n.is_usable)
    return tuple(sorted({*state.ledger, *barred, *kept}))


def _is_recovering(state: State, now: float) -> bool:
    """Whether ranks are about to run on nodes that are there: nothing must slow that down."""
    attempt = state.attempt
    if attempt is None:
        return False
    if not attempt.is_live:
        nodes = place(state) or place_smaller(state)
        return nodes is not None and (choose(state, nodes) is not None or not has_history(state))
    if attempt.phase is not AttemptPhase.RUNNING or attempt.started_at is None:
        return True
    is_silent = state.waited_s(attempt.started_at, now) > SETTLED_S  # a script without heartbeats
    return attempt.first_step_at is None and not is_silent


def coming(state: State, now: float) -> int:
    """Return how many nodes are on their way: asked for, or given and their agent not there yet."""
    total = 0
    for allocation in state.living_allocations:
        own = state.members(allocation)
        if allocation.given_back or any(state.nodes[name].warned for name in own):
            continue
        if allocation.is_waiting:
            total += allocation.nodes
        elif is_coming(state, allocation, now):
            total += max(0, allocation.nodes - len(own))
    return total


def is_coming(state: State, allocation: Allocation, now: float) -> bool:
    """Whether agents of an allocation that has its nodes may still be on their way."""
    if allocation.given_at is None or allocation.came:
        return False
    return state.waited_s(allocation.given_at, now) <= state.policy.launch_timeout_s


def is_deserted(state: State, allocation: Allocation, now: float) -> bool:
    """Whether all its agents have been gone for so long that its end would have been told."""
    nodes = [state.nodes[name] for name in state.members(allocation)]
    if not nodes or any(node.alive for node in nodes):
        return False
    return state.waited_s(max(node.lost_at or 0.0 for node in nodes), now) > ENDING_S


def fruitless(state: State, now: float) -> tuple[Allocation, ...]:
    """Return the allocations asked for since the last recovery of which nothing came.

    Those that an attempt did without, as it went on making steps, say nothing about the next ones.
    """
    since = _last_step_at(state)
    return tuple(
        a
        for a in state.allocations
        if a.asked_at >= since and not _was_of_use(state, a)
        if a.is_over or a.given_back or not (a.is_waiting or a.came or is_coming(state, a, now))
    )


def _last_step_at(state: State) -> float:
    """Return when a recovery was last known to have worked, 0 for never."""
    attempt = state.attempt
    stepped = [i.first_step_at for i in state.incidents if i.first_step_at is not None]
    if attempt is not None and attempt.first_step_at is not None:
        stepped.append(attempt.over_at or attempt.first_step_at)
    return max(stepped, default=0.0)


def _was_of_use(state: State, a: Allocation) -> bool:
    """Whether its end is no failure: made room, was given back, or was a spare for a while.

    A time limit is one: who asks again gets the same limit, and again makes no step within it.
    """
    is_returned = a.given_back and not a.unheld and (a.came or not a.had_nodes)
    return a.ending is Ending.PREEMPTED or is_returned or _was_spare(state, a)


def _was_spare(state: State, a: Allocation) -> bool:
    had_s = (a.over_at or 0.0) - (a.given_at or 0.0)
    return a.spared and had_s > state.policy.launch_timeout_s


def _made_room(state: State) -> tuple[Allocation, ...]:
    """Return those preempted before a step was made with them, but for the first: bad luck."""
    since = _last_step_at(state)
    preempted = (a for a in state.allocations if a.ending is Ending.PREEMPTED)
    return tuple(a for a in preempted if a.asked_at >= since and not _was_spare(state, a))[1:]


def _next_request_at(state: State, now: float) -> float:
    """Return when nodes may be asked for again after requests that brought none; inf for never.

    A run that trains with fewer has time: it asks for as long as it lasts. So does one that is
    preempted again and again: that is no failure, but asking at once would only load the cluster.
    """
    lost = fruitless(state, now)
    vain = (*lost, *_made_room(state))
    if not vain:
        return 0.0
    ended_at = max(a.over_at or a.given_at or a.asked_at for a in vain)
    is_live = state.attempt is not None and state.attempt.is_live
    if len(lost) >= MOST_FRUITLESS:
        return ended_at + LONGEST_PAUSE_S if is_live else math.inf
    doublings = min(len(vain) - 1, 16)
    return ended_at + min(FIRST_PAUSE_S * 2.0**doublings, LONGEST_PAUSE_S)


def gone(state: State) -> str:
    """Name the nodes that are of no use, and why, at most four of them."""
    texts = [
        f"{n.name} ({n.complaint or _warning(n) or n.lost_why})"
        for n in state.nodes.values()
        if not n.is_good
    ]
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return ", ".join(texts[:4]) + more if texts else "fewer came than were asked for"


def _warning(node: Node) -> str:
    if node.given_back:
        return "given back"
    return f"its allocation ends, SIG{node.warned}" if node.warned else ""


def _is_ending_unknown(state: State, now: float) -> bool:
    """Whether an allocation is being ended and it is not known yet by whom.

    A person's scancel stops the run, so nothing is asked for before that can be told.
    """
    for a in state.allocations:
        if a.given_back or not state.is_being_ended(a):
            continue
        if not a.is_over:
            if is_deserted(state, a, now):
                continue  # only its agents were told to end
            return True
        is_told = a.ending not in (None, Ending.UNKNOWN)
        if not is_told and state.waited_s(a.over_at or 0.0, now) <= ENDING_S:
            return True
    return False


def no_capacity(state: State, now: float, policy: Policy) -> Decision | None:
    """Too few nodes for an attempt: wait for more, then give up."""
    if state.run is None or not state.allocations or is_pending(state, Launch):
        return None
    if state.attempt is not None and state.attempt.is_live:
        return None
    is_first = state.attempt is None
    if place(state) is not None or (not is_first and place_smaller(state) is not None):
        return None
    queued = [a for a in state.living_allocations if a.phase is AllocationPhase.QUEUED]
    if queued:
        return wait(state, "no_capacity", f"waiting in the queue: {queued[0].why}")
    next_at = _next_request_at(state, now)
    if policy.replace_nodes and now < next_at < math.inf:
        return wait(state, "no_capacity", "waiting to ask again for nodes that did not come")
    least = state.run.nodes if is_first else policy.min_nodes or state.run.nodes
    have, need = count_usable(state), least
    over_at = state.attempt.over_at if state.attempt else None
    given = [a.given_at or a.over_at or a.asked_at for a in state.allocations]
    if state.waited_s(max([*given, over_at or 0.0]), now) > policy.launch_timeout_s:
        lost = [f"{n.name}: {n.excluded or n.unfit or n.lost_why}" for n in state.nodes.values()]
        named = "; ".join(text for text in lost if not text.endswith(": "))
        reason = f"no capacity: {have} of {need} nodes usable for {policy.launch_timeout_s:g} s"
        return fail(state, "no_capacity", f"{reason} ({named})" if named else reason, ())
    return wait(state, "no_capacity", f"waiting for nodes: {have} of {need} are usable")
