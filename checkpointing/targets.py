"""The leaves of a live state, and what of a checkpoint fills each of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from checkpointing import leaves as leaf_bytes
from checkpointing.boxes import Box, whole
from checkpointing.checksum import crc64
from checkpointing.errors import CheckpointDamaged, RestoreFailed
from checkpointing.extents import SHARD, Extent, Extents
from checkpointing.sharded import Sharded, as_sharded, is_sharded
from checkpointing.small import LARGEST, Small
from checkpointing.sources import Part, Wanted
from checkpointing.stage.copying import lies_in_a_row
from checkpointing.tree import Flat, Node, named_leaves

_LITTLE: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One half of a checkpoint: the state, or this rank's own.

    Attributes:
        skeleton: Its structure and Python values.
        extents: What is stored of its tensors.
        keys: By owner, the object that holds it.
        size_of: Asks how long an object is; None when the bytes are here.
    """

    skeleton: Node
    extents: Extents
    keys: Mapping[int, str]
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

    def crc64(self) -> int:
        """Return what the filled leaf must have."""
        return self.wanted[0].extent.crc64 if self.wanted else crc64(self.out.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The leaves of one half of a state and what fills them.

    Attributes:
        single: Those that are looked at one by one.
        small: Plain small tensors that equal the one stored extent.
    """

    single: list[Target]
    small: Small

    @property
    def leaves(self) -> dict[str, Any]:
        """All of them by name."""
        small = zip(self.small.extents.names, self.small.leaves, strict=True)
        return {**dict(small), **{target.name: target.leaf for target in self.single}}


def targets_of(saved: Saved, flat: Flat) -> Targets:
    """Return what each leaf of the checkpoint fills, from its exact piece or from parts."""
    _room_is_needed(saved, flat)
    extents = saved.extents
    is_whole = (extents.kind != SHARD).tolist()
    lines = {name: n for n, name in enumerate(extents.names) if is_whole[n]}
    forms, is_small = extents.form.tolist(), dict[tuple[Any, ...], bool]()
    numbers, leaves, rest = list[int](), list[Any](), dict[str, str]()
    for name, kind in named_leaves(saved.skeleton):
        leaf: Any = flat.leaves.get(name)
        line = lines.get(name)
        if line is None or leaf_bytes.plain_kind(leaf) != "tensor" or not lies_in_a_row(leaf):
            rest[name] = kind
            continue
        look = forms[line], kind, leaf.dtype, leaf.shape
        if look not in is_small:
            is_small[look] = _is_small(kind, extents[line], leaf)
        if is_small[look]:
            numbers.append(line)
            leaves.append(leaf)
        else:
            rest[name] = kind
    pieces = _pieces(saved, rest)
    return Targets(
        single=[_target(n, kind, pieces[n], flat.leaves.get(n)) for n, kind in rest.items()],
        small=Small(
            extents=extents.rows(np.array(numbers, np.intp)),
            keys=saved.keys,
            leaves=leaves,
            addresses=[leaf.data_ptr() for leaf in leaves],
        ),
    )


def _is_small(kind: str, like: Extent, leaf: Any) -> bool:
    """Tell whether a tensor can be filled by its address."""
    require_same(like.name, kind, like, leaf)
    return 0 < like.nbytes <= LARGEST and leaf_bytes.nbytes_of(leaf) == like.nbytes


def _pieces(saved: Saved, names: Collection[str]) -> dict[str, list[tuple[Extent, str]]]:
    """Return what is stored of some tensors, and in which objects."""
    numbers = [n for n, name in enumerate(saved.extents.names) if name in names]
    found: dict[str, list[tuple[Extent, str]]] = {name: [] for name in names}
    for extent in saved.extents.rows(np.array(numbers, np.intp)):
        found[extent.name].append((extent, saved.keys[extent.owner]))
    for name, held in found.items():
        if not held:
            raise RestoreFailed(f"{name}: named by the checkpoint but not in it")
    return found


def _room_is_needed(saved: Saved, flat: Flat) -> None:
    """Check that what the state does not hold is really there, before room is made for it."""
    numbers = [n for n, name in enumerate(saved.extents.names) if name not in flat.leaves]
    made = saved.extents.rows(np.array(numbers, np.intp))
    if saved.size_of is None or sum(made.nbytes.tolist()) < _LITTLE:
        return
    ends: dict[str, int] = {}
    for extent in made:
        key = saved.keys[extent.owner]
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
    held = as_held(leaf)
    require_same(name, kind, like, held)
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


def as_held(leaf: Any) -> Any:
    """Return a leaf as what it is here: asking a DTensor again and again takes long."""
    return as_sharded(leaf) if is_sharded(leaf) else leaf


def require_same(name: str, kind: str, extent: Extent, held: Any) -> None:
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
