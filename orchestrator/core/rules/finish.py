"""The run is done when every rank left with code 0 and its last checkpoint is safe."""

from orchestrator.core.actions import Decision, Finish, Outcome
from orchestrator.core.policy import Policy
from orchestrator.core.rules.operator import upload_settled
from orchestrator.core.rules.verdicts import make
from orchestrator.core.state import State


def finished(state: State, now: float, policy: Policy) -> Decision | None:
    """Finish after a clean end of all ranks."""
    attempt = state.attempt
    if attempt is None or attempt.is_live or state.stop_requested_seq:
        return None
    if len(attempt.exits) < attempt.world or any(attempt.exits.values()):
        return None
    if not upload_settled(state, now, policy):
        return None
    reason = f"all {attempt.world} ranks finished"
    if state.run and state.run.checkpoints and state.commits:
        reason += f"; the last checkpoint, step {state.commits[0][0]}, is committed"
    action = Finish(outcome=Outcome.FINISHED)
    return make(state, "finished", action, reason, (attempt.ordered_seq,), 1)
