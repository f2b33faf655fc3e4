"""Which bytes a rank stages, where they lie in its arena, and which rank uploads them."""

import hashlib
import heapq
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from checkpointing import leaves as leaf_bytes
from checkpointing.boxes import Box, whole
from checkpointing.sharded import as_sharded, is_sharded
from checkpointing.tree import Flat, Node, flatten, unflatten

__all__ = ["Extent", "Flat", "Node", "Plan", "flatten", "make_plan", "owners", "unflatten"]

ALIGN: Final = 4096
SMALL_ALIGN: Final = 64  # of what is smaller than `ALIGN`: a page for each would be mostly gaps
Kind = Literal["replica", "shard", "local"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One tensor's bytes.

    Attributes:
        name: Path in the state, parts joined by "/".
        kind: `replica`, alike on all ranks; `shard`, a piece of a tensor that is spread over the
            ranks; or `local`, this rank's own.
        owner: Rank that uploads it; -1 for a piece that another rank with the same one uploads.
        dtype: Name of the element type.
        shape: Shape of the tensor, or of the piece.
        offset: Where it begins: in the slot's extent area, or in an index in the uploaded object
            (-1 there when another rank uploads it).
        nbytes: Length.
        crc64: CRC64NVME of the bytes.
        whole: Shape of the whole tensor that a `shard` is a piece of, () for other kinds.
        start: Where it begins in the whole, () for other kinds.
        blocks: CRC64NVME of each `leaves.BLOCK` bytes of a larger one, for who reads a part.
    """

    name: str
    kind: Kind
    owner: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc64: int = 0
    whole: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()

    @property
    def box(self) -> Box:
        """Its place in the whole tensor."""
        return Box(self.start, self.shape) if self.kind == "shard" else whole(self.shape)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.whole if self.kind == "shard" else self.shape

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; not by `asdict`, whose deep copies show in the stall of a save."""
        value = {name: getattr(self, name) for name in _FIELDS}
        if self.kind == "shard":
            value |= {name: getattr(self, name) for name in _SHARD_FIELDS}
        elif self.blocks:
            value["blocks"] = self.blocks
        return value

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Extent":
        """Read the JSON form."""
        lists = {name: tuple(fields[name]) for name in _LISTS if name in fields}
        return cls(**{**fields, **lists})


_SHARD_FIELDS: Final = ("whole", "start", "blocks")
_LISTS: Final = ("shape", *_SHARD_FIELDS)
_FIELDS: Final = tuple(f.name for f in fields(Extent) if f.name not in _SHARD_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where each leaf of a state goes; the same for all states of one structure.

    Attributes:
        structure: Hash of names, dtypes, shapes, rank and world.
        extents: In order of their offsets, CRCs not filled in.
        data_nbytes: Length of the extent area.
    """

    structure: str
    extents: tuple[Extent, ...]
    data_nbytes: int


def owners(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """Spread names over ranks so that the bytes are balanced; the same on every rank."""
    load = [(0, rank) for rank in range(world)]
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        nbytes, rank = heapq.heappop(load)
        chosen[name] = rank
        heapq.heappush(load, (nbytes + sizes[name], rank))
    return chosen


def structure_hash(replica: Flat, local: Flat, rank: int, world: int) -> str:
    """Hash everything that a plan depends on."""
    shapes = [
        [name, leaf_bytes.dtype_of(leaf), leaf_bytes.shape_of(leaf), *_place(leaf)]
        for flat in (replica, local)
        for name, leaf in flat.leaves.items()
    ]
    text = json.dumps([rank, world, len(replica.leaves), shapes])
    return hashlib.sha256(text.encode()).hexdigest()


def _place(leaf: Any) -> list[Any]:
    if not is_sharded(leaf):
        return []
    piece = as_sharded(leaf)
    return [piece.shape, piece.start, piece.copy, piece.copies]


def make_plan(replica: Flat, local: Flat, rank: int, world: int) -> Plan:
    """Lay out a state: first what this rank uploads, then what others do.

    Raises:
        TypeError: The rank's own state holds a piece of a tensor that is spread over the ranks.
    """
    odd = next((name for name, leaf in local.leaves.items() if is_sharded(leaf)), None)
    if odd is not None:
        raise TypeError(f"{odd}: a piece of a sharded tensor belongs to the state, not to `local`")
    found = [*_pieces(replica, rank), *_replicas(replica, world)]
    found += [_extent(n, x, kind="local", owner=rank) for n, x in local.leaves.items()]
    extents, offset = [], 0
    for extent in sorted(found, key=lambda e: (e.owner != rank, e.kind == "local")):
        align = ALIGN if extent.nbytes >= ALIGN else SMALL_ALIGN
        offset = -(-offset // align) * align
        extents.append(replace(extent, offset=offset))
        offset += extent.nbytes
    return Plan(
        structure=structure_hash(replica, local, rank, world),
        extents=tuple(extents),
        data_nbytes=-(-offset // ALIGN) * ALIGN,
    )


def _replicas(state: Flat, world: int) -> list[Extent]:
    leaves = {n: leaf for n, leaf in state.leaves.items() if not is_sharded(leaf)}
    owner = owners({n: leaf_bytes.nbytes_of(leaf) for n, leaf in leaves.items()}, world)
    return [_extent(n, leaf, kind="replica", owner=owner[n]) for n, leaf in leaves.items()]


def _pieces(state: Flat, rank: int) -> list[Extent]:
    """Lay out sharded tensors; of the ranks with the same piece one uploads it, in turn by name."""
    found = []
    for name, leaf in state.leaves.items():
        if not is_sharded(leaf):
            continue
        piece = as_sharded(leaf)
        chosen = zlib.crc32(f"{name} {piece.start}".encode()) % piece.copies
        extent = _extent(name, leaf, kind="shard", owner=rank if chosen == piece.copy else -1)
        found.append(replace(extent, whole=piece.shape, start=piece.start))
    return found


def _extent(name: str, leaf: Any, *, kind: Kind, owner: int) -> Extent:
    return Extent(
        name=name,
        kind=kind,
        owner=owner,
        dtype=leaf_bytes.dtype_of(leaf),
        shape=leaf_bytes.shape_of(leaf),
        offset=0,
        nbytes=leaf_bytes.nbytes_of(leaf),
    )
