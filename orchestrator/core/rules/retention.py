"""What no rule of the run's file keeps is deleted, a few at a time and never what may be needed."""

from orchestrator.core.actions import Decision, Prune, Source
from orchestrator.core.policy import Policy
from orchestrator.core.rules.verdicts import is_pending, make
from orchestrator.core.state import Place, State

MOST_AT_ONCE = 16


def prune(state: State, now: float, policy: Policy) -> Decision | None:
    """Delete the oldest of what was found to be kept by no rule."""
    if not state.unkept or is_pending(state, Prune):
        return None
    needed = needed_places(state)
    places = tuple(sorted(p for p in state.unkept if p not in needed)[:MOST_AT_ONCE])
    if not places:
        return None
    steps = ", ".join(f"{step:,}" for step, _ in places)
    reason = f"no rule of checkpoint.keep keeps {'step' if len(places) == 1 else 'steps'} {steps}"
    return make(state, "retention", Prune(places=places), reason, (), state.seq)


def needed_places(state: State) -> frozenset[Place]:
    """Return what a restart may restore next, whatever the rules say.

    That is the newest and its fallback, and the one that this attempt started from and its
    fallback.
    """
    usable = [c for c in state.commits if (*c, Source.STORE.value) not in state.quarantined]
    needed = set(usable[:2])
    restore = state.attempt.restore if state.attempt is not None else None
    if restore is not None:
        started = (restore.step, restore.attempt)
        needed |= {started, *[c for c in usable if c < started][:1]}
    return frozenset(needed)
