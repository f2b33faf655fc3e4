"""Brings a rank's live state to the checkpoint that its attempt starts from."""

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from checkpointing.environment import OnOtherWorld, RankEnvironment
from checkpointing.errors import (
    CHECKPOINT_DAMAGED_EXIT,
    RESTORE_FAILED_EXIT,
    CheckpointDamaged,
    CheckpointingError,
    RestoreFailed,
)
from checkpointing.restore import Point, restore_from_memory, restore_from_store
from checkpointing.saving import State, leave
from checkpointing.stage.stager import Stager
from checkpointing.store.base import StoreConfig, open_store
from checkpointing.tree import flatten

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
    `CHECKPOINT_DAMAGED_EXIT`.

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
        is_damaged = isinstance(error, CheckpointDamaged)
        code = CHECKPOINT_DAMAGED_EXIT if is_damaged else RESTORE_FAILED_EXIT
        leave(code, f"rank {env.rank}: restore failed: {error}")
    return step


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
        store = open_store(StoreConfig.from_json(env.store))
        saved_by = restore_from_store(
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
