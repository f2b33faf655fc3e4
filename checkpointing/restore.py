"""Brings a live state to a checkpoint, bit for bit, or fails without a doubt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from checkpointing import keys
from checkpointing import leaves as leaf_bytes
from checkpointing.errors import (
    STORE_AWAY,
    ArenaInvalid,
    CheckpointDamaged,
    CheckpointingError,
    ManifestInvalid,
    ObjectCorrupt,
    ObjectMissing,
    RestoreFailed,
    StoreMissing,
)
from checkpointing.manifest import Manifest, read_commit, read_index
from checkpointing.optimizer_state import create_missing
from checkpointing.plan import Extent
from checkpointing.sources import ArenaSource, Part, Wanted, fill_from_store
from checkpointing.stage.arena import MappedArena
from checkpointing.stage.crew import Crew
from checkpointing.store.base import ObjectStore
from checkpointing.targets import Saved, overlapping, targets_of, verify
from checkpointing.tree import Node, flatten, is_object, put_back

State = Mapping[str, Any]
Fill = Callable[[Sequence[Wanted], Sequence[Part]], None]
_DAMAGE: Final = (ManifestInvalid, ObjectCorrupt, ObjectMissing)
_NO_STATE: Node = {"t": "dict", "k": [], "v": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A checkpoint by name: finished steps and the attempt that staged it."""

    step: int
    attempt: int


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
    with _opened(own) as arena:
        if arena is None:
            raise RestoreFailed(f"no arena at {own}")
        try:
            source = _slot(arena, point, rank, world)
        except ArenaInvalid as error:
            raise RestoreFailed(str(error)) from error
        if source is None:
            raise RestoreFailed(
                f"the arena of rank {rank} does not hold step {point.step} of attempt "
                f"{point.attempt} whole"
            )
        extents = source.meta.extents

        def half(skeleton: Node, *kinds: str) -> Saved:
            found = {extent.name: [(extent, "")] for extent in extents if extent.kind in kinds}
            return Saved(skeleton=skeleton, pieces=found)

        def fill(wanted: Sequence[Wanted], parts: Sequence[Part]) -> None:
            if parts:
                raise RestoreFailed(f"{parts[0].extent.name}: not the piece that this rank staged")
            if failed := source.fill(wanted, crew):
                raise RestoreFailed(f"{failed[0].extent.name}: its bytes in memory fail their CRC")

        _restore(
            (
                half(source.meta.skeleton, "replica", "shard"),
                half(source.meta.local_skeleton, "local"),
            ),
            (state, local),
            fill,
            crew,
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
    try:
        manifest = _committed(store, run, point)
        objects = {shard.rank: shard.data_key for shard in manifest.shards}
        pieces: dict[str, list[tuple[Extent, str]]] = {}
        for extent in manifest.tensors:
            pieces.setdefault(extent.name, []).append((extent, objects[extent.owner]))
        size_of = partial(_size_of, store)
        own = Saved(skeleton=_NO_STATE, pieces={})
        if fresh_local and world != manifest.world:
            local = None
        if local is not None:
            if world != manifest.world:
                raise RestoreFailed(
                    f"step {point.step} has the own state of {manifest.world} ranks, not {world}"
                )
            shard = manifest.shards[rank]
            index = read_index(store, shard.index_key, shard.index_crc64)
            mine = {e.name: [(e, shard.data_key)] for e in index.extents if e.kind == "local"}
            own = Saved(skeleton=index.local_skeleton, pieces=mine, size_of=size_of)
        crew = crew or Crew(1)
        fill = _arena_first(store, arena, point, rank, world, crew)
        saved = Saved(skeleton=manifest.skeleton, pieces=pieces, size_of=size_of)
        _restore((saved, own), (state, local), fill, crew)
        return manifest.world
    except (RestoreFailed, *STORE_AWAY):
        raise
    except CheckpointingError as error:
        if isinstance(error, ObjectMissing):
            _require_commits(store, run)
        kind = CheckpointDamaged if isinstance(error, _DAMAGE) else RestoreFailed
        raise kind(f"step {point.step} of attempt {point.attempt}: {error}") from error


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


def _arena_first(
    store: ObjectStore,
    own: Path | MappedArena | None,
    point: Point,
    rank: int,
    world: int,
    crew: Crew,
) -> Fill:
    def fill(wanted: Sequence[Wanted], parts: Sequence[Part]) -> None:
        rest = wanted
        with _opened(own) as arena:
            if arena is not None:
                with suppress(ArenaInvalid):
                    source = _slot(arena, point, rank, world)
                    rest = source.fill(wanted, crew) if source is not None else wanted
        fill_from_store(store, rest, parts)

    return fill


@contextmanager
def _opened(own: Path | MappedArena | None) -> Iterator[MappedArena | None]:
    """Give an arena, mapped for as long as it takes if it is not yet; None when there is none."""
    if own is None or isinstance(own, MappedArena):
        yield own
        return
    try:
        arena = MappedArena(own)
    except (FileNotFoundError, ArenaInvalid):
        yield None
        return
    try:
        yield arena
    finally:
        arena.close()


def _size_of(store: ObjectStore, key: str) -> int:
    info = store.head(key)
    return info.nbytes if info is not None else 0


def _slot(arena: MappedArena, point: Point, rank: int, world: int) -> ArenaSource | None:
    for staged in arena.staged():
        if (staged.step, staged.attempt, staged.rank, staged.world) == (
            point.step,
            point.attempt,
            rank,
            world,
        ):
            return ArenaSource(arena, staged)
    return None


def _restore(
    saved: tuple[Saved, Saved], states: tuple[State, State | None], fill: Fill, crew: Crew
) -> None:
    """Read both halves into place, then hand over the Python values."""
    create_missing(states[0], saved[0].skeleton)
    halves = [
        (half, state, targets_of(half, flatten(state)))
        for half, state in zip(saved, states, strict=True)
        if state is not None
    ]
    targets = [target for _, _, found in halves for target in found]
    fill([w for t in targets for w in t.wanted], [p for t in targets for p in t.parts])
    shared = overlapping(targets)
    has_objects = any(is_object(value) for _, state, _ in halves for value in state.values())
    for half, state, found in halves:
        try:
            for target in found:
                if target.is_scratch:
                    leaf_bytes.copy_in(target.leaf, target.out)
            put_back(state, half.skeleton, {target.name: target.leaf for target in found})
        except Exception as error:
            raise RestoreFailed(f"the state does not take the checkpoint: {error}") from error
    for _, state, found in halves:
        doubted = found if has_objects else [target for target in found if id(target) in shared]
        verify(found, flatten(state), doubted, crew)
