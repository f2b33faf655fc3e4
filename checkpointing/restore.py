"""Brings a live state to a checkpoint, bit for bit, or fails without a doubt."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from checkpointing import keys
from checkpointing import leaves as leaf_bytes
from checkpointing.errors import (
    STORE_AWAY,
    CheckpointDamaged,
    CheckpointingError,
    ManifestInvalid,
    ObjectCorrupt,
    ObjectMissing,
    RestoreFailed,
    StoreMissing,
)
from checkpointing.extents import LOCAL, Extents
from checkpointing.filling import (
    Fill,
    Point,
    ToFill,
    fill_from_arena_and_store,
    fill_from_memory,
    opened,
    whole_slot,
)
from checkpointing.manifest import Manifest, read_commit, read_index
from checkpointing.optimizer_state import create_missing
from checkpointing.stage.arena import MappedArena
from checkpointing.stage.crew import Crew
from checkpointing.stage.meta import Meta
from checkpointing.store.base import ObjectStore
from checkpointing.taken import overlapping, verify
from checkpointing.targets import Saved, targets_of
from checkpointing.tree import flatten, is_object, put_back

__all__ = ["Point", "restore_from_memory", "restore_from_store"]

State = Mapping[str, Any]
_DAMAGE: Final = (ManifestInvalid, ObjectCorrupt, ObjectMissing)


def restore_from_memory(
    own: Path | MappedArena,
    point: Point,
    rank: int,
    world: int,
    state: State,
    local: State | None,
    crew: Crew | None = None,
) -> None:
    """Restore from this rank's own arena and from nothing else.

    Args:
        own: The arena.
        point: Which checkpoint.
        rank: This rank.
        world: Number of ranks.
        state: To be filled.
        local: To be filled, with what this rank saved.
        crew: The threads that copy; None for this one alone.

    Raises:
        RestoreFailed: The arena does not hold this checkpoint, whole and unaltered.
    """
    crew = crew or Crew(1)
    with opened(own) as arena:
        if arena is None:
            raise RestoreFailed(f"no arena at {own}")
        source = whole_slot(arena, point, rank, world)
        _restore(
            _halves_of(source.meta), (state, local), partial(fill_from_memory, source, crew), crew
        )


def _halves_of(meta: Meta) -> tuple[Saved, Saved]:
    is_local = meta.extents.kind == LOCAL
    keys = dict.fromkeys(meta.extents.owner.tolist(), "")
    return (
        Saved(skeleton=meta.skeleton, extents=meta.extents.rows(~is_local), keys=keys),
        Saved(skeleton=meta.local_skeleton, extents=meta.extents.rows(is_local), keys=keys),
    )


def restore_from_store(
    store: ObjectStore,
    run: str,
    point: Point,
    rank: int,
    world: int,
    state: State,
    local: State | None,
    arena: Path | MappedArena | None = None,
    *,
    fresh_local: bool = False,
    crew: Crew | None = None,
) -> int:
    """Restore a committed checkpoint; extents that the own arena holds are taken from there.

    Args:
        store: Where it is.
        run: Name of the run.
        point: Which one.
        rank: This rank.
        world: Number of ranks now.
        state: To be filled.
        local: To be filled, with what this rank saved.
        arena: The own arena.
        fresh_local: Leave `local` as it is when another number of ranks saved the checkpoint.
        crew: The threads that copy from the arena; None for this one alone.

    Returns:
        Number of ranks that saved it.

    Raises:
        CheckpointDamaged: What the store holds is not what was committed.
        RestoreFailed: Not committed, or for another state.
        StoreError: One of `STORE_AWAY`: whether it can be restored is not known.
    """
    crew = crew or Crew(1)
    try:
        manifest = _committed(store, run, point)
        if fresh_local and world != manifest.world:
            local = None
        saved = _state_of(store, manifest)
        own = None if local is None else _own(store, manifest, rank, world)
        fill = partial(fill_from_arena_and_store, store, arena, (point, rank, world), crew)
        _restore((saved, own), (state, local), fill, crew)
        return manifest.world
    except (RestoreFailed, *STORE_AWAY):
        raise
    except CheckpointingError as error:
        if isinstance(error, ObjectMissing):
            _require_commits(store, run)
        kind = CheckpointDamaged if isinstance(error, _DAMAGE) else RestoreFailed
        raise kind(f"step {point.step} of attempt {point.attempt}: {error}") from error


def _state_of(store: ObjectStore, manifest: Manifest) -> Saved:
    return Saved(
        skeleton=manifest.skeleton,
        extents=Extents.of(manifest.tensors),
        keys={shard.rank: shard.data_key for shard in manifest.shards},
        size_of=partial(_size_of, store),
    )


def _own(store: ObjectStore, manifest: Manifest, rank: int, world: int) -> Saved:
    """Return what a rank saved for itself."""
    if world != manifest.world:
        raise RestoreFailed(
            f"step {manifest.step} has the own state of {manifest.world} ranks, not {world}"
        )
    shard = manifest.shards[rank]
    index = read_index(store, shard.index_key, shard.index_crc64)
    extents = Extents.of(index.extents)
    return Saved(
        skeleton=index.local_skeleton,
        extents=extents.rows(extents.kind == LOCAL),
        keys=defaultdict(lambda: shard.data_key),
        size_of=partial(_size_of, store),
    )


def _committed(store: ObjectStore, run: str, point: Point) -> Manifest:
    try:
        return read_commit(store, run, point.step, point.attempt)
    except ObjectMissing as error:  # of something that it names this would be a damage
        _require_commits(store, run)
        raise RestoreFailed(str(error)) from error


def _require_commits(store: ObjectStore, run: str) -> None:
    """Tell an object that is missing from a store that is: an empty mount point has nothing."""
    if not store.list(keys.commits_prefix(run)):
        raise StoreMissing(f"{run}: the store has no commit at all any more; is it mounted?")


def _size_of(store: ObjectStore, key: str) -> int:
    info = store.head(key)
    return info.nbytes if info is not None else 0


def _restore(
    saved: tuple[Saved, Saved | None], states: tuple[State, State | None], fill: Fill, crew: Crew
) -> None:
    """Read both halves into place, then hand over the Python values."""
    create_missing(states[0], saved[0].skeleton)
    halves = [
        (half, state, targets_of(half, flatten(state)))
        for half, state in zip(saved, states, strict=True)
        if half is not None and state is not None
    ]
    found = [targets for _, _, targets in halves]
    fill(ToFill.of(found))
    doubted: Sequence[Collection[str]] = overlapping(found)
    if any(is_object(value) for _, state, _ in halves for value in state.values()):
        doubted = [targets.leaves.keys() for targets in found]
    for half, state, targets in halves:
        try:
            for target in targets.single:
                if target.is_scratch:
                    leaf_bytes.copy_in(target.leaf, target.out)
            put_back(state, half.skeleton, targets.leaves)
        except Exception as error:
            raise RestoreFailed(f"the state does not take the checkpoint: {error}") from error
    for (_, state, targets), names in zip(halves, doubted, strict=True):
        verify(targets, flatten(state), names, crew)
