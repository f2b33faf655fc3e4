"""Brings a live state to a checkpoint, bit for bit, or fails without a doubt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing import keys
from checkpointing import leaves as leaf_bytes
from checkpointing.errors import ArenaInvalid, CheckpointingError, RestoreFailed
from checkpointing.manifest import read_index, read_manifest
from checkpointing.plan import Extent
from checkpointing.sources import ArenaSource, Wanted, fill_from_store
from checkpointing.stage.arena import MappedArena
from checkpointing.store.base import ObjectStore
from checkpointing.tree import Flat, Node, flatten, named_leaves, put_back

State = Mapping[str, Any]
_NO_STATE: Node = {"t": "dict", "k": [], "v": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A checkpoint by name: finished steps and the attempt that staged it."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """One half of a checkpoint: the replicated state or this rank's own."""

    skeleton: Node
    wanted: Mapping[str, tuple[Extent, str]]


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

        def half(kind: str, skeleton: Node) -> _Saved:
            chosen = {extent.name: (extent, "") for extent in extents if extent.kind == kind}
            return _Saved(skeleton=skeleton, wanted=chosen)

        def fill(wanted: Sequence[Wanted]) -> None:
            for item in wanted:
                if not source.fill(item):
                    raise RestoreFailed(f"{item.extent.name}: its bytes in memory fail their CRC")

        _restore(
            (half("replica", source.meta.skeleton), half("local", source.meta.local_skeleton)),
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
) -> None:
    """Restore a committed checkpoint; extents that the own arena holds are taken from there.

    Raises:
        RestoreFailed: Not committed, altered, or for another state.
    """
    try:
        manifest = read_manifest(store, keys.manifest_key(run, point.step))
        if manifest.attempt != point.attempt:
            raise RestoreFailed(
                f"step {point.step} is committed from attempt {manifest.attempt}, "
                f"not from {point.attempt}"
            )
        objects = {shard.rank: shard.data_key for shard in manifest.shards}
        replica = {extent.name: (extent, objects[extent.owner]) for extent in manifest.tensors}
        own = _Saved(skeleton=_NO_STATE, wanted={})
        if local is not None:
            if world != manifest.world:
                raise RestoreFailed(
                    f"step {point.step} has the own state of {manifest.world} ranks, not {world}"
                )
            shard = manifest.shards[rank]
            index = read_index(store, shard.index_key, shard.index_crc64)
            mine = {e.name: (e, shard.data_key) for e in index.extents if e.kind == "local"}
            own = _Saved(skeleton=index.local_skeleton, wanted=mine)
        fill = _arena_first(store, arena_path, point, rank, world)
        _restore((_Saved(skeleton=manifest.skeleton, wanted=replica), own), (state, local), fill)
    except RestoreFailed:
        raise
    except CheckpointingError as error:
        raise RestoreFailed(f"step {point.step} of attempt {point.attempt}: {error}") from error


def _arena_first(
    store: ObjectStore, path: Path | None, point: Point, rank: int, world: int
) -> Callable[[Sequence[Wanted]], None]:
    def fill(wanted: Sequence[Wanted]) -> None:
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
        fill_from_store(store, rest)

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


def _restore(
    saved: tuple[_Saved, _Saved],
    states: tuple[State, State | None],
    fill: Callable[[Sequence[Wanted]], None],
) -> None:
    """Read both halves into place, then hand over the Python values."""
    halves = [
        (half, state, _prepare(half, flatten(state)))
        for half, state in zip(saved, states, strict=True)
        if state is not None
    ]
    fill([item for _, _, (_, wanted, _) in halves for item in wanted])
    for half, state, (leaves, wanted, scratch) in halves:
        try:
            for item in wanted:
                if item.extent.name in scratch:
                    leaf_bytes.copy_in(leaves[item.extent.name], item.out)
            put_back(state, half.skeleton, leaves)
        except Exception as error:
            raise RestoreFailed(f"the state does not take the checkpoint: {error}") from error
        _verify(half, flatten(state))


def _prepare(saved: _Saved, flat: Flat) -> tuple[dict[str, Any], list[Wanted], frozenset[str]]:
    """Return the leaves to end up with, what to read where, and which leaves need a copy."""
    leaves: dict[str, Any] = {}
    wanted: list[Wanted] = []
    scratch: set[str] = set()
    for name, kind in named_leaves(saved.skeleton):
        if name not in saved.wanted:
            raise RestoreFailed(f"{name}: named by the checkpoint but not in it")
        extent, key = saved.wanted[name]
        leaf = flat.leaves.get(name)
        if leaf is None or (isinstance(leaf, np.ndarray) and not leaf.flags.writeable):
            leaf = leaf_bytes.empty(kind, extent.dtype, extent.shape)
        _same(name, kind, extent, leaf)
        out = leaf_bytes.bytes_of(leaf)
        if out is None:
            out = np.empty(extent.nbytes, dtype=np.uint8)
            scratch.add(name)
        leaves[name] = leaf
        wanted.append(Wanted(extent=extent, key=key, out=out))
    return leaves, wanted, frozenset(scratch)


def _same(name: str, kind: str, extent: Extent, leaf: Any) -> None:
    found_kind = "ndarray" if isinstance(leaf, np.ndarray) else "tensor"
    saved = (kind, extent.dtype, extent.shape)
    found = (found_kind, leaf_bytes.dtype_of(leaf), leaf_bytes.shape_of(leaf))
    if saved != found:
        raise RestoreFailed(
            f"{name}: saved as {saved[0]} {saved[1]} {list(saved[2])}, "
            f"the state has {found[0]} {found[1]} {list(found[2])}; nothing is cast"
        )


def _verify(saved: _Saved, flat: Flat) -> None:
    """Check what `load_state_dict` made of it: some cast, some drop."""
    for name, kind in named_leaves(saved.skeleton):
        leaf = flat.leaves.get(name)
        if leaf is None:
            raise RestoreFailed(f"{name}: was saved, and the state did not take it")
        extent, _ = saved.wanted[name]
        _same(name, kind, extent, leaf)
        if leaf_bytes.crc_of(leaf) != extent.crc64:
            raise RestoreFailed(f"{name}: the state changed it while taking it")
