"""The run is done when every rank left with code 0 and its last checkpoint is safe."""

from orchestrator.core.actions import Decision, Finish, Outcome
from orchestrator.core.policy import Policy
from orchestrator.core.rules.operator import upload_settled
from orchestrator.core.rules.verdicts import make, wait
from orchestrator.core.state import State


def finished(state: State, now: float, policy: Policy) -> Decision | None:
    """Finish after a clean end of all ranks."""
    attempt = state.attempt
    if attempt is None or not attempt.is_finished or state.stop_requested_seq:
        return None
    if not upload_settled(state, now, policy):
        # Holds back every later rule: a node that leaves now is no failure of the run.
        return wait(state, "finished", "all ranks finished; waiting for the last upload")
    reason = f"all {attempt.world} ranks finished"
    if state.run and state.run.checkpoints and state.commits:
        reason += f"; the last checkpoint, step {state.commits[0][0]}, is committed"
    action = Finish(outcome=Outcome.FINISHED)
    return make(state, "finished", action, reason, (attempt.ordered_seq,), 1)
