"""A checkpoint is committed when every rank's part of it is in the store."""

from orchestrator.core.actions import Commit, Decision
from orchestrator.core.policy import Policy
from orchestrator.core.rules.verdicts import make
from orchestrator.core.state import State

FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 60.0


def commit(state: State, now: float, policy: Policy) -> Decision | None:
    """Commit the newest complete set of shards; older complete sets follow."""
    for key in sorted(state.uploads, reverse=True):
        shards = state.uploads[key]
        world = next(iter(shards.values())).world
        if len(shards) < world or _is_asked(state, key) or _backs_off(state, key, now):
            continue
        step, attempt = key
        reason = f"all {world} shards of step {step} are in the store"
        if key in state.failed_commits:
            reason += f"; asked again after {state.failed_commits[key].times} without an answer"
        # One checkpoint may be asked for more than once, so its step would not make the key unique.
        return make(state, "commit", Commit(step=step, attempt=attempt), reason, (), state.seq)
    return None


def _is_asked(state: State, key: tuple[int, int]) -> bool:
    return any(
        isinstance(p.action, Commit) and (p.action.step, p.action.attempt) == key
        for p in state.pending.values()
    )


def _backs_off(state: State, key: tuple[int, int], now: float) -> bool:
    failed = state.failed_commits.get(key)
    if failed is None:
        return False
    pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failed.times - 1, 16))
    return 0 <= now - failed.at < pause_s
