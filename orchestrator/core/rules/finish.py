"""The run is done when every rank left with code 0 and its last checkpoint is safe."""

from orchestrator.core.actions import Decision, Finish, Outcome
from orchestrator.core.policy import Policy
from orchestrator.core.rules.operator import stop_wanted, upload_settled
from orchestrator.core.rules.verdicts import make, wait
from orchestrator.core.state import Attempt, State


def finished(state: State, now: float, policy: Policy) -> Decision | None:
    """Finish after a clean end of all ranks."""
    attempt = state.attempt
    if attempt is None or not attempt.is_finished or stop_wanted(state):
        return None
    if not upload_settled(state, now, policy):
        # Holds back every later rule: a node that leaves now is no failure of the run.
        return wait(state, "finished", "all ranks finished; waiting for the last upload")
    reason = f"all {attempt.world} ranks finished"
    if state.run and state.run.checkpoints:
        reason += f"; {_kept(state, attempt, policy)}"
    action = Finish(outcome=Outcome.FINISHED)
    return make(state, "finished", action, reason, (attempt.ordered_seq,), 1)


def _kept(state: State, attempt: Attempt, policy: Policy) -> str:
    """Say what of the run's end is in the store."""
    if not state.commits and policy.watches:
        return "`everstep status` tells what its own folders came to (checkpoint.watch)"
    if not state.commits:
        return "NOTHING WAS SAVED: call ck.finish(...) behind the loop"
    newest = state.commits[0][0]
    kept = f"the last checkpoint, step {newest}, is committed"
    if attempt.max_step > newest:
        behind = attempt.max_step - newest
        kept += f"; {behind} STEPS AFTER IT WERE NOT SAVED: call ck.finish(...) behind the loop"
    return kept
