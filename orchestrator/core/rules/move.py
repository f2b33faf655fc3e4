"""Leaving nodes of one's own accord: they are wanted back, excluded, or more have come.

The ranks save at one step and leave; nothing is lost. The next attempt is then placed by
`restart`, as after a fault.
"""

from orchestrator.core.actions import Decision, StopRanks
from orchestrator.core.placement import place
from orchestrator.core.policy import Policy
from orchestrator.core.rules.verdicts import make
from orchestrator.core.state import Attempt, AttemptPhase, State


def move(state: State, now: float, policy: Policy) -> Decision | None:
    """Stop as planned when the attempt could, or must, go on elsewhere."""
    attempt = state.attempt
    if attempt is None or state.run is None or not state.run.checkpoints:
        return None  # nothing would be kept
    if attempt.phase is not AttemptPhase.RUNNING or attempt.first_step_at is None:
        return None
    if attempt.exits:
        return None  # they have begun to finish
    found = _ending(state, attempt) or _elsewhere(state, attempt)
    if found is None:
        return None
    fault, reason = found
    action = StopRanks(attempt=attempt.number, nodes=attempt.manned, planned=True, moved=fault)
    return make(state, "move", action, reason, (attempt.ordered_seq,), attempt.stop_orders + 1)


def _ending(state: State, attempt: Attempt) -> tuple[str, str] | None:
    """An allocation ends soon: what is not saved by then is lost."""
    warned = {n: state.nodes[n].warned for n in attempt.nodes if state.nodes[n].warned}
    if not warned:
        return None
    name, signal = next(iter(warned.items()))
    job = state.nodes[name].job
    if signal == "USR2":
        return "time_limit", f"allocation {job} reaches its time limit soon: save, then leave it"
    return "allocation_ended", f"allocation {job} is being ended by Slurm: save, then leave it"


def _elsewhere(state: State, attempt: Attempt) -> tuple[str, str] | None:
    """Better nodes are there for all of the attempt's that should not be used any more."""
    assert state.run is not None
    nodes = place(state)
    if nodes is None or set(nodes) == set(attempt.nodes):
        return None
    new = [name for name in nodes if name not in attempt.nodes]
    if not all(state.nodes[name].is_good for name in new):
        return None
    if len(nodes) > len(attempt.nodes):
        return "moved", f"{', '.join(new)} came: the run can have all its {len(nodes)} nodes again"
    if not all(state.nodes[name].is_good for name in nodes):
        return None  # for some nothing better is there yet: once, and not once for each
    left = [name for name in attempt.nodes if name not in nodes]
    why = "; ".join(f"{n}: {state.nodes[n].complaint}" for n in left)
    return "moved", f"{', '.join(left)} is to be left ({why}), and others are there for its ranks"
