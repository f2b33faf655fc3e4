"""Brings a rank's live state to the checkpoint that its attempt starts from."""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from checkpointing.environment import OnOtherWorld, RankEnvironment
from checkpointing.errors import (
    CHECKPOINT_DAMAGED_EXIT,
    RESTORE_FAILED_EXIT,
    STORE_AWAY,
    STORE_AWAY_EXIT,
    CheckpointDamaged,
    CheckpointingError,
    RestoreFailed,
)
from checkpointing.heartbeat import SLOW_PHASE
from checkpointing.restore import Point, restore_from_memory, restore_from_store
from checkpointing.saving import State, leave
from checkpointing.stage.stager import Stager
from checkpointing.store.base import StoreConfig, open_store
from checkpointing.tree import flatten

LONGEST_WAIT_S: Final = 300.0
"""The longest that a rank waits for a store; then its node may be of more use elsewhere."""

_PAUSE_S: Final = 5.0
_Answer = TypeVar("_Answer")
_ERRORS: Final = (CheckpointingError, OSError, ValueError, KeyError, TypeError)
_log = logging.getLogger(__name__)


def bring(
    env: RankEnvironment,
    stager: Stager,
    sources: tuple[State, State | None],
    states: tuple[Mapping[str, Any], Mapping[str, Any] | None],
    on_other_world: OnOtherWorld,
) -> int | None:
    """Restore what the environment names, and return its step; None for a fresh start.

    What fails ends the process with `RESTORE_FAILED_EXIT`, a damaged checkpoint with
    `CHECKPOINT_DAMAGED_EXIT`, a store that stays away with `STORE_AWAY_EXIT`.

    Args:
        env: What the agent says.
        stager: Has the arena.
        sources: What the script gave: state and own state, or functions that return them.
        states: What those returned.
        on_other_world: What to do about `local` if another number of ranks saved.

    Raises:
        TypeError: The state holds what cannot be saved.
    """
    state, local = states
    flatten(state), flatten(local or {})  # what cannot be saved is the script's mistake: now
    try:
        wanted = json.loads(env.restore)
        if wanted is None:
            return None
        step = _restore(env, stager, wanted, states, fresh_local=on_other_world == "fresh")
        _reached(sources[0], state)
        _reached(sources[1], local)
    except _ERRORS as error:
        leave(_code_of(error), f"rank {env.rank}: restore failed: {error}")
    return step


def _code_of(error: Exception) -> int:
    if isinstance(error, CheckpointDamaged):
        return CHECKPOINT_DAMAGED_EXIT
    return STORE_AWAY_EXIT if isinstance(error, STORE_AWAY) else RESTORE_FAILED_EXIT


def _patience_s(env: RankEnvironment) -> float:
    """Return for how long a store may be away: half of what the agent allows for a restore."""
    return min(LONGEST_WAIT_S, SLOW_PHASE * env.step_timeout_s / 2)


def _once_there(patience_s: float, action: Callable[[], _Answer]) -> _Answer:
    """Read from a store, and again for some time while it is away."""
    return Retrying(
        stop=stop_after_delay(patience_s),
        wait=wait_random_exponential(multiplier=0.2, max=min(_PAUSE_S, patience_s / 4)),
        retry=retry_if_exception_type(STORE_AWAY),
        before_sleep=_say_away,
        reraise=True,
    )(action)


def _say_away(state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        _log.warning("the store is away, asking again: %s", state.outcome.exception())


def _restore(
    env: RankEnvironment,
    stager: Stager,
    wanted: Mapping[str, Any],
    states: tuple[Mapping[str, Any], Mapping[str, Any] | None],
    *,
    fresh_local: bool,
) -> int:
    state, local = states
    own = stager.arena() or env.arena
    point = Point(step=int(wanted["step"]), attempt=int(wanted["attempt"]))
    if wanted["source"] == "memory":
        restore_from_memory(own, point, env.rank, env.world, state, local, stager.crew)
    elif wanted["source"] == "store":
        patience_s = _patience_s(env)
        store = open_store(StoreConfig.from_json(env.store), patience_s=patience_s / 4)
        read = partial(
            restore_from_store,
            store,
            env.run,
            point,
            env.rank,
            env.world,
            state,
            local,
            own,
            fresh_local=fresh_local,
            crew=stager.crew,
        )
        saved_by = _once_there(patience_s, read)
        if local is not None and saved_by != env.world:
            _log.warning(
                "step %d was saved by %d ranks, this is one of %d: its own state begins afresh",
                *(point.step, saved_by, env.world),
            )
    else:
        raise RestoreFailed(f"unknown source {wanted['source']!r}")
    return point.step


def _reached(source: State | None, restored: Mapping[str, Any] | None) -> None:
    """Check that a callable now returns what was restored, not plain values from elsewhere."""
    if not callable(source) or restored is None:
        return
    if flatten(source()).skeleton != flatten(restored).skeleton:
        raise RestoreFailed(
            "the function that gives the state makes plain values anew, which cannot be restored: "
            "give a mapping, or an object with load_state_dict()"
        )
