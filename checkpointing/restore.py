"""Brings a live state to a checkpoint, bit for bit, or fails without a doubt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from checkpointing import leaves as leaf_bytes
from checkpointing.boxes import Box, whole
from checkpointing.checksum import crc64
from checkpointing.errors import (
    ArenaInvalid,
    CheckpointDamaged,
    CheckpointingError,
    ManifestInvalid,
    ObjectCorrupt,
    ObjectMissing,
    RestoreFailed,
)
from checkpointing.manifest import Manifest, read_commit, read_index
from checkpointing.optimizer_state import create_missing
from checkpointing.plan import Extent
from checkpointing.sharded import as_sharded, is_sharded
from checkpointing.sources import ArenaSource, Part, Wanted, fill_from_store
from checkpointing.stage.arena import MappedArena
from checkpointing.store.base import ObjectStore
from checkpointing.tree import Flat, Node, flatten, named_leaves, put_back

State = Mapping[str, Any]
Fill = Callable[[Sequence[Wanted], Sequence[Part]], None]
_LITTLE: Final = 64 << 20
_DAMAGE: Final = (ManifestInvalid, ObjectCorrupt, ObjectMissing)
_NO_STATE: Node = {"t": "dict", "k": [], "v": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A checkpoint by name: finished steps and the attempt that staged it."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """One half of a checkpoint: the state, or this rank's own.

    Attributes:
        skeleton: Its structure and Python values.
        pieces: By tensor, what is stored of it and in which object.
        size_of: Asks how long an object is; None when the bytes are here.
    """

    skeleton: Node
    pieces: Mapping[str, Sequence[tuple[Extent, str]]]
    size_of: Callable[[str], int] | None = None


def restore_from_memory(
    path: Path, point: Point, rank: int, world: int, state: State, local: State | None
) -> None:
    """Restore from this rank's own arena and from nothing else.

    Raises:
        RestoreFailed: The arena does not hold this checkpoint, whole and unaltered.
    """
    arena = _open_arena(path)
    if arena is None:
        raise RestoreFailed(f"no arena at {path}")
    try:
        source = _slot(arena, point, rank, world)
        if source is None:
            raise RestoreFailed(
                f"the arena of rank {rank} does not hold step {point.step} of attempt "
                f"{point.attempt} whole"
            )
        extents = source.meta.extents

        def half(skeleton: Node, *kinds: str) -> _Saved:
            found = {extent.name: [(extent, "")] for extent in extents if extent.kind in kinds}
            return _Saved(skeleton=skeleton, pieces=found)

        def fill(wanted: Sequence[Wanted], parts: Sequence[Part]) -> None:
            if parts:
                raise RestoreFailed(f"{parts[0].extent.name}: not the piece that this rank staged")
            for item in wanted:
                if not source.fill(item):
                    raise RestoreFailed(f"{item.extent.name}: its bytes in memory fail their CRC")

        _restore(
            (
                half(source.meta.skeleton, "replica", "shard"),
                half(source.meta.local_skeleton, "local"),
            ),
            (state, local),
            fill,
        )
    except ArenaInvalid as error:
        raise RestoreFailed(str(error)) from error
    finally:
        arena.close()


def restore_from_store(
    store: ObjectStore,
    run: str,
    point: Point,
    rank: int,
    world: int,
    state: State,
    local: State | None,
    arena_path: Path | None = None,
    *,
    fresh_local: bool = False,
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
        arena_path: The own arena.
        fresh_local: Leave `local` as it is when another number of ranks saved the checkpoint.

    Returns:
        Number of ranks that saved it.

    Raises:
        CheckpointDamaged: What the store holds is not what was committed.
        RestoreFailed: Not committed, or for another state.
    """
    try:
        manifest = _committed(store, run, point)
        objects = {shard.rank: shard.data_key for shard in manifest.shards}
        pieces: dict[str, list[tuple[Extent, str]]] = {}
        for extent in manifest.tensors:
            pieces.setdefault(extent.name, []).append((extent, objects[extent.owner]))
        size_of = partial(_size_of, store)
        own = _Saved(skeleton=_NO_STATE, pieces={})
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
            own = _Saved(skeleton=index.local_skeleton, pieces=mine, size_of=size_of)
        fill = _arena_first(store, arena_path, point, rank, world)
        saved = _Saved(skeleton=manifest.skeleton, pieces=pieces, size_of=size_of)
        _restore((saved, own), (state, local), fill)
        return manifest.world
    except RestoreFailed:
        raise
    except CheckpointingError as error:
        kind = CheckpointDamaged if isinstance(error, _DAMAGE) else RestoreFailed
        raise kind(f"step {point.step} of attempt {point.attempt}: {error}") from error


def _committed(store: ObjectStore, run: str, point: Point) -> Manifest:
    try:
        return read_commit(store, run, point.step, point.attempt)
    except ObjectMissing as error:  # of something that it names this would be a damage
        raise RestoreFailed(str(error)) from error


def _arena_first(
    store: ObjectStore, path: Path | None, point: Point, rank: int, world: int
) -> Fill:
    def fill(wanted: Sequence[Wanted], parts: Sequence[Part]) -> None:
        arena = _open_arena(path) if path is not None else None
        rest = wanted
        if arena is not None:
            try:
                source = _slot(arena, point, rank, world)
                if source is not None:
                    rest = [item for item in wanted if not source.fill(item)]
            except ArenaInvalid:
                rest = wanted
            finally:
                arena.close()
        fill_from_store(store, rest, parts)

    return fill


def _open_arena(path: Path) -> MappedArena | None:
    try:
        return MappedArena(path)
    except (FileNotFoundError, ArenaInvalid):
        return None


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


def _restore(saved: tuple[_Saved, _Saved], states: tuple[State, State | None], fill: Fill) -> None:
    """Read both halves into place, then hand over the Python values."""
    create_missing(states[0], saved[0].skeleton)
    halves = [
        (half, state, _targets(half, flatten(state)))
        for half, state in zip(saved, states, strict=True)
        if state is not None
    ]
    targets = [target for _, _, found in halves for target in found]
    fill([w for t in targets for w in t.wanted], [p for t in targets for p in t.parts])
    for half, state, found in halves:
        try:
            for target in found:
                if target.is_scratch:
                    leaf_bytes.copy_in(target.leaf, target.out)
            put_back(state, half.skeleton, {target.name: target.leaf for target in found})
        except Exception as error:
            raise RestoreFailed(f"the state does not take the checkpoint: {error}") from error
        _verify(found, flatten(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A leaf of the live state and what fills it.

    Attributes:
        leaf: The leaf; a new one where the state has none or one that cannot be written.
        like: What is stored of it, for dtype and shape of the whole.
        out: The bytes to fill: the leaf's own, or room to be copied from (`is_scratch`).
        wanted: The one stored piece that it equals, else nothing.
        parts: What else of stored pieces makes it up.
    """

    name: str
    kind: str
    leaf: Any
    like: Extent
    out: leaf_bytes.Bytes
    is_scratch: bool
    wanted: tuple[Wanted, ...]
    parts: tuple[Part, ...]

    @property
    def crc64(self) -> int:
        """What the filled leaf must have."""
        return self.wanted[0].extent.crc64 if self.wanted else crc64(self.out.data)


def _targets(saved: _Saved, flat: Flat) -> list[_Target]:
    _room_is_needed(saved, flat)
    found = []
    for name, kind in named_leaves(saved.skeleton):
        if not saved.pieces.get(name):
            raise RestoreFailed(f"{name}: named by the checkpoint but not in it")
        found.append(_target(name, kind, saved.pieces[name], flat.leaves.get(name)))
    return found


def _room_is_needed(saved: _Saved, flat: Flat) -> None:
    """Check that what the state does not hold is really there, before room is made for it."""
    made = [
        piece for name, held in saved.pieces.items() if name not in flat.leaves for piece in held
    ]
    if saved.size_of is None or sum(extent.nbytes for extent, _ in made) < _LITTLE:
        return
    ends: dict[str, int] = {}
    for extent, key in made:
        ends[key] = max(ends.get(key, 0), extent.offset + extent.nbytes)
    for key, end in ends.items():
        if saved.size_of(key) < end:
            raise CheckpointDamaged(f"{key}: is said to have {end} bytes, and is shorter")


def _size_of(store: ObjectStore, key: str) -> int:
    info = store.head(key)
    return info.nbytes if info is not None else 0


def _target(name: str, kind: str, pieces: Sequence[tuple[Extent, str]], leaf: Any) -> _Target:
    like = pieces[0][0]
    if leaf is None and kind == "shard":
        raise RestoreFailed(
            f"{name}: sharded in the checkpoint, and the state does not say which piece of it this "
            "rank has; create it before the restore"
        )
    if leaf is None or (isinstance(leaf, np.ndarray) and not leaf.flags.writeable):
        leaf = leaf_bytes.empty(kind, like.dtype, like.shape)
    _same(name, kind, like, leaf)
    out = leaf_bytes.bytes_of(leaf)
    is_scratch = out is None
    if out is None:
        out = np.empty(leaf_bytes.nbytes_of(leaf), dtype=np.uint8)
    box = _box_of(leaf)
    exact = next((piece for piece in pieces if piece[0].box == box), None)
    wanted = (Wanted(extent=exact[0], key=exact[1], out=out),) if exact else ()
    parts = () if exact else _parts(pieces, box, out)
    held = box.volume if exact else sum(part.box.volume for part in parts)
    if held != box.volume:
        raise RestoreFailed(f"{name}: {held} of {box.volume} elements are stored")
    return _Target(
        name=name,
        kind=kind,
        leaf=leaf,
        like=like,
        out=out,
        is_scratch=is_scratch,
        wanted=wanted,
        parts=parts,
    )


def _parts(
    pieces: Sequence[tuple[Extent, str]], box: Box, out: leaf_bytes.Bytes
) -> tuple[Part, ...]:
    """Return what of each stored piece lies in the box that is wanted."""
    found = []
    for extent, key in pieces:
        common = extent.box.overlap(box)
        if common is None:
            continue
        items = out.view(f"V{extent.nbytes // extent.box.volume}").reshape(box.shape)
        place = items[common.inside(box).slices()]
        found.append(Part(extent=extent, key=key, box=common.inside(extent.box), out=place))
    return tuple(found)


def _box_of(leaf: Any) -> Box:
    return as_sharded(leaf).box if is_sharded(leaf) else whole(leaf_bytes.shape_of(leaf))


def _same(name: str, kind: str, extent: Extent, leaf: Any) -> None:
    """Check that a leaf is of the stored kind; a piece is one of a tensor as well."""
    found_kind = "ndarray" if isinstance(leaf_bytes.plain(leaf), np.ndarray) else "tensor"
    kind = found_kind if kind == "shard" else kind
    shape = as_sharded(leaf).shape if is_sharded(leaf) else leaf_bytes.shape_of(leaf)
    saved = (kind, extent.dtype, extent.global_shape)
    found = (found_kind, leaf_bytes.dtype_of(leaf), shape)
    if saved != found:
        raise RestoreFailed(
            f"{name}: saved as {saved[0]} {saved[1]} {list(saved[2])}, "
            f"the state has {found[0]} {found[1]} {list(found[2])}; nothing is cast"
        )


def _verify(targets: Sequence[_Target], flat: Flat) -> None:
    """Check what `load_state_dict` made of it: some cast, some drop."""
    for target in targets:
        leaf = flat.leaves.get(target.name)
        if leaf is None:
            raise RestoreFailed(f"{target.name}: was saved, and the state did not take it")
        _same(target.name, target.kind, target.like, leaf)
        if leaf_bytes.crc_of(leaf) != target.crc64:
            raise RestoreFailed(f"{target.name}: the state changed it while taking it")
