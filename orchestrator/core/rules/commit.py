"""A checkpoint is committed when every rank's part of it is in the store."""

from orchestrator.core.actions import Commit, Decision
from orchestrator.core.policy import Policy
from orchestrator.core.rules.verdicts import make
from orchestrator.core.state import State


def commit(state: State, now: float, policy: Policy) -> Decision | None:
    """Commit the newest complete set of shards; older complete sets follow."""
    for key in sorted(state.uploads, reverse=True):
        shards = state.uploads[key]
        world = next(iter(shards.values())).world
        step, attempt = key
        decision = make(
            state,
            "commit",
            Commit(step=step, attempt=attempt),
            f"all {world} shards of step {step} are in the store",
            (),
            step,
        )
        if len(shards) == world and not _asked(state, step, attempt):
            return decision
    return None


def _asked(state: State, step: int, attempt: int) -> bool:
    return any(
        isinstance(p.action, Commit) and p.action.step == step and p.action.attempt == attempt
        for p in state.pending.values()
    )
