"""A checkpoint that turned out to be damaged is never chosen again, by no run and no supervisor."""

from orchestrator.core.actions import Decision, Quarantine, Source
from orchestrator.core.policy import Policy
from orchestrator.core.rules.verdicts import ended_badly, make
from orchestrator.core.state import State

DAMAGED = "checkpoint_damaged"


def quarantine(state: State, now: float, policy: Policy) -> Decision | None:
    """Put into quarantine what a rank could not read back from the store as it was written.

    A restore may fail for many reasons, and then this run tries another checkpoint. For other runs
    only this one counts: of a store that does not answer, or of a script that has changed, no
    checkpoint is any worse.
    """
    ended = ended_badly(state)
    if ended is None:
        return None
    attempt, incident = ended
    restore = attempt.restore
    if restore is None or restore.source is not Source.STORE:
        return None
    if (restore.step, restore.attempt) in state.in_quarantine:
        return None
    found = next((clue for clue in attempt.clues if clue.note == DAMAGED), None)
    if found is None:
        return None
    action = Quarantine(
        step=restore.step,
        attempt=restore.attempt,
        why=found.text or incident.cause,
        found_by=attempt.number,
    )
    reason = f"rank {found.rank} of attempt {attempt.number} found it damaged"
    evidence = (found.seq, attempt.verdict_seq)
    return make(state, "quarantine", action, reason, evidence, attempt.number)
