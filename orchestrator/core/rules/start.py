"""The first attempt of a run (also of a run that goes on from an older one's checkpoints)."""

from orchestrator.core import disks
from orchestrator.core.actions import Decision, StartRanks
from orchestrator.core.placement import place, place_smaller
from orchestrator.core.policy import Policy
from orchestrator.core.restore import choose, has_history
from orchestrator.core.rules.verdicts import fail, make, wait
from orchestrator.core.state import State


def start(state: State, now: float, policy: Policy) -> Decision | None:
    """Start as soon as enough agents are there and the store's catalogue is known."""
    if state.attempt is not None or state.run is None:
        return None
    nodes = place(state) or _place_late(state, now, policy)
    if nodes is None:
        return None
    if state.run.checkpoints and not state.catalogue_read:
        problem = state.catalogue_problem or "not answered yet"
        return wait(state, "start", f"waiting for the list of checkpoints: {problem}")
    restore = choose(state, nodes)
    if restore is None and has_history(state):
        return _lacks_history(state, now, policy)
    action = StartRanks(
        attempt=state.last_attempt + 1,
        nodes=nodes,
        ranks_per_node=state.run.ranks_per_node,
        restore=restore,
        interval_steps=state.interval_steps,
    )
    origin = "step 0, nothing committed yet"
    if restore is not None:
        origin = f"step {restore.step} of {restore.source.words}"
    fewer = "" if len(nodes) == state.run.nodes else f" of {state.run.nodes}"
    noun = "node is" if len(nodes) == 1 else "nodes are"
    reason = f"{len(nodes)}{fewer} {noun} ready; start from {origin}"
    evidence = tuple(sorted(state.nodes[name].joined_seq for name in nodes))
    return make(state, "start", action, reason, evidence, action.attempt)


def _lacks_history(state: State, now: float, policy: Policy) -> Decision:
    """Wait for what an earlier journal of the run knew to be on disks; never begin without."""
    if disks.are_awaited(state, now, policy):
        return wait(state, "start", f"waiting for {disks.whereabouts(state)}")
    return fail(state, "history_unusable", disks.unusable(state), ())


def _place_late(state: State, now: float, policy: Policy) -> tuple[str, ...] | None:
    """Return a placement on fewer nodes once those that were given had their time to come."""
    given_at = [a.given_at for a in state.allocations if a.given_at is not None]
    if not given_at or state.waited_s(max(given_at), now) <= policy.launch_timeout_s:
        return None
    return place_smaller(state)
