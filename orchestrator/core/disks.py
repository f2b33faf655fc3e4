"""What the nodes' disks hold, also those of nodes that are gone and may come back."""

from collections import defaultdict

from orchestrator.core.events import DISK, Replica
from orchestrator.core.node import AllocationPhase
from orchestrator.core.policy import Policy
from orchestrator.core.state import Place, State


def newest(state: State) -> Place | None:
    """Return the newest checkpoint that is known ever to have been whole on disks."""
    ranks: dict[tuple[Place, int], set[int]] = defaultdict(set)
    for node in state.nodes.values():
        for copy in node.shelf:
            if copy.attempt <= state.last_attempt:
                ranks[(copy.step, copy.attempt), copy.world].add(copy.rank)
    whole = [place for (place, world), found in ranks.items() if len(found) == world]
    before = () if state.on_disks is None else (state.on_disks,)
    return max((*whole, *before), default=None)


def are_awaited(state: State, now: float, policy: Policy) -> bool:
    """Whether nodes that hold it may still come: they have as long as nodes have to come at all."""
    if state.on_disks is None or (*state.on_disks, DISK) in state.quarantined:
        return False
    if any(a.phase is AllocationPhase.QUEUED for a in state.living_allocations):
        return True
    given = [a.given_at or a.over_at or a.asked_at for a in state.allocations]
    over_at = state.attempt.over_at if state.attempt is not None else None
    since = max([*given, over_at or 0.0, state.requested_at])
    return state.waited_s(since, now) <= policy.launch_timeout_s


def unusable(state: State) -> str:
    """Say why a run with a history ends rather than begin anew."""
    lost = f"none of the {len(state.commits)} committed checkpoints can be restored"
    if not state.commits and state.on_disks is None:
        lost = f"step {state.committed_before} was committed, and this run file's store lacks it"
    elif not state.commits:
        lost = f"nobody brought {whereabouts(state)}"
        if state.on_disks is not None and (*state.on_disks, DISK) in state.quarantined:
            lost = f"step {state.on_disks[0]} could not be restored from the nodes' disks"
    return f"{lost}; not starting over from step 0"


def whereabouts(state: State) -> str:
    """Say what lies where, and who of them is gone."""
    assert state.on_disks is not None
    step, attempt = state.on_disks

    def is_part(copy: Replica) -> bool:
        return (copy.step, copy.attempt) == (step, attempt)

    gone = [n.name for n in state.nodes.values() if not n.alive and any(map(is_part, n.shelf))]
    more = f" and {len(gone) - 4} more" if len(gone) > 4 else ""
    names = f": {', '.join(gone[:4])}{more}" if gone else ""
    return f"step {step}, which is on the disks of nodes that are not here{names}"
