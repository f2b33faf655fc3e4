"""What several rules ask about the state; nothing here decides."""

from orchestrator.core.actions import Action, Decision, Finish, Outcome, Wait, kind_of
from orchestrator.core.state import Attempt, Incident, State


def make(
    state: State, rule: str, action: Action, reason: str, evidence: tuple[int, ...], n: int
) -> Decision:
    """Build a decision with its idempotency key `run/attempt/kind/n`; `n` makes it unique."""
    assert state.run is not None
    key = f"{state.run.run}/{state.last_attempt}/{kind_of(action)}/{n}"
    return Decision(key=key, rule=rule, action=action, reason=reason, evidence=evidence)


def wait(state: State, rule: str, reason: str) -> Decision:
    """Say what is being waited for."""
    return make(state, rule, Wait(), reason, (), state.seq)


def fail(state: State, rule: str, reason: str, evidence: tuple[int, ...]) -> Decision:
    """End the run as failed; the reason is what the page says."""
    return make(state, rule, Finish(outcome=Outcome.FAILED), reason, evidence, 1)


def ended_badly(state: State) -> tuple[Attempt, Incident] | None:
    """Return the current attempt and its incident once it is over and judged."""
    attempt = state.attempt
    if attempt is None or attempt.is_live or attempt.verdict is None or not state.incidents:
        return None
    return attempt, state.incidents[-1]


def is_pending(state: State, kind: type) -> bool:
    """Whether an action of this kind has no outcome yet."""
    return any(isinstance(p.action, kind) for p in state.pending.values())
