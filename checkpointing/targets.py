"""The leaves of a live state, and what of a checkpoint fills each of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from checkpointing import leaves as leaf_bytes
from checkpointing.boxes import Box, whole
from checkpointing.checksum import crc64
from checkpointing.errors import CheckpointDamaged, RestoreFailed
from checkpointing.plan import Extent
from checkpointing.sharded import Sharded, as_sharded, is_sharded
from checkpointing.sources import Part, Wanted
from checkpointing.stage.crew import Crew, Task
from checkpointing.tree import Flat, Node, named_leaves

_LITTLE: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One half of a checkpoint: the state, or this rank's own.

    Attributes:
        skeleton: Its structure and Python values.
        pieces: By tensor, what is stored of it and in which object.
        size_of: Asks how long an object is; None when the bytes are here.
    """

    skeleton: Node
    pieces: Mapping[str, Sequence[tuple[Extent, str]]]
    size_of: Callable[[str], int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
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


def targets_of(saved: Saved, flat: Flat) -> list[Target]:
    """Return what each leaf of the checkpoint fills, from its exact piece or from parts."""
    _room_is_needed(saved, flat)
    found = []
    for name, kind in named_leaves(saved.skeleton):
        if not saved.pieces.get(name):
            raise RestoreFailed(f"{name}: named by the checkpoint but not in it")
        found.append(_target(name, kind, saved.pieces[name], flat.leaves.get(name)))
    return found


def _room_is_needed(saved: Saved, flat: Flat) -> None:
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


def _target(name: str, kind: str, pieces: Sequence[tuple[Extent, str]], leaf: Any) -> Target:
    like = pieces[0][0]
    if leaf is None and kind == "shard":
        raise RestoreFailed(
            f"{name}: sharded in the checkpoint, and the state does not say which piece of it this "
            "rank has; create it before the restore"
        )
    if leaf is None or (isinstance(leaf, np.ndarray) and not leaf.flags.writeable):
        leaf = leaf_bytes.empty(kind, like.dtype, like.shape)
    held = _held(leaf)
    _same(name, kind, like, held)
    out = leaf_bytes.bytes_of(held)
    is_scratch = out is None
    if out is None:
        out = np.empty(leaf_bytes.nbytes_of(held), dtype=np.uint8)
    box = held.box if isinstance(held, Sharded) else whole(leaf_bytes.shape_of(held))
    exact = next((piece for piece in pieces if piece[0].box == box), None)
    wanted = (Wanted(extent=exact[0], key=exact[1], out=out),) if exact else ()
    parts = () if exact else _parts(pieces, box, out)
    found = box.volume if exact else sum(part.box.volume for part in parts)
    if found != box.volume:
        raise RestoreFailed(f"{name}: {found} of {box.volume} elements are stored")
    return Target(
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


def _held(leaf: Any) -> Any:
    """Return a leaf as what it is here: asking a DTensor again and again takes long."""
    return as_sharded(leaf) if is_sharded(leaf) else leaf


def _same(name: str, kind: str, extent: Extent, held: Any) -> None:
    """Check that a leaf is of the stored kind; a piece is one of a tensor as well."""
    found_kind = "ndarray" if isinstance(leaf_bytes.plain(held), np.ndarray) else "tensor"
    kind = found_kind if kind == "shard" else kind
    shape = held.shape if isinstance(held, Sharded) else leaf_bytes.shape_of(held)
    saved = (kind, extent.dtype, extent.global_shape)
    found = (found_kind, leaf_bytes.dtype_of(held), shape)
    if saved != found:
        raise RestoreFailed(
            f"{name}: saved as {saved[0]} {saved[1]} {list(saved[2])}, "
            f"the state has {found[0]} {found[1]} {list(found[2])}; nothing is cast"
        )


def verify(targets: Sequence[Target], flat: Flat, doubted: Sequence[Target], crew: Crew) -> None:
    """Check what the state made of it: some `load_state_dict` cast, some drop.

    Args:
        targets: What was filled, and summed on its way.
        flat: The state now.
        doubted: What may have changed since; so may leaves that the state made anew.
        crew: The threads that sum.

    Raises:
        RestoreFailed: Something is missing, or not what was read.
    """
    doubts = {id(target) for target in doubted}
    sums: list[Task] = []
    changed: list[str] = []

    def compare(target: Target, leaf: Any) -> None:
        if leaf_bytes.crc_of(leaf) != target.crc64:
            changed.append(target.name)

    for target in targets:
        leaf = flat.leaves.get(target.name)
        if leaf is None:
            raise RestoreFailed(f"{target.name}: was saved, and the state did not take it")
        if leaf is target.leaf and not target.is_scratch and id(target) not in doubts:
            continue
        _same(target.name, target.kind, target.like, _held(leaf))
        sums.append(partial(compare, target, leaf))
    crew.run(sums)
    if changed:
        raise RestoreFailed(f"{min(changed)}: the state changed it while taking it")


def overlapping(targets: Sequence[Target]) -> set[int]:
    """Return (by `id`) what has memory in common with another: one may have overwritten it."""
    spans = sorted((int(t.out.ctypes.data), t.out.nbytes, id(t)) for t in targets if t.out.nbytes)
    found: set[int] = set()
    end = last = 0
    for begin, nbytes, target in spans:
        if begin < end:
            found |= {last, target}
        if begin + nbytes > end:
            end, last = begin + nbytes, target
    return found
