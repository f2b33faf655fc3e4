"""Which bytes a rank stages, where they lie in its arena, and which rank uploads them."""

import hashlib
import heapq
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple

from checkpointing import leaves as leaf_bytes
from checkpointing.boxes import Box, whole
from checkpointing.sharded import Sharded, as_sharded, is_sharded
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
    return _hash(_forms(replica), _forms(local), rank, world)


def make_plan(replica: Flat, local: Flat, rank: int, world: int) -> Plan:
    """Lay out a state: first what this rank uploads, then what others do.

    Raises:
        TypeError: The rank's own state holds a piece of a tensor that is spread over the ranks.
    """
    state, own = _forms(replica), _forms(local)
    odd = next((form.name for form in own if form.piece is not None), None)
    if odd is not None:
        raise TypeError(f"{odd}: a piece of a sharded tensor belongs to the state, not to `local`")
    found: list[tuple[_Form, Kind, int]] = []
    found += [(form, "shard", _uploader(form, rank)) for form in state if form.piece is not None]
    whole = [form for form in state if form.piece is None]
    owner = owners({form.name: form.nbytes for form in whole}, world)
    found += [(form, "replica", owner[form.name]) for form in whole]
    found += [(form, "local", rank) for form in own]
    found.sort(key=lambda one: (one[2] != rank, one[1] == "local"))
    extents, offset = [], 0
    for form, kind, uploader in found:
        align = ALIGN if form.nbytes >= ALIGN else SMALL_ALIGN
        offset = -(-offset // align) * align
        extents.append(_extent(form, kind, uploader, offset))
        offset += form.nbytes
    return Plan(
        structure=_hash(state, own, rank, world),
        extents=tuple(extents),
        data_nbytes=-(-offset // ALIGN) * ALIGN,
    )


class _Form(NamedTuple):
    """What a plan has to know of a leaf."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    piece: Sharded | None


def _forms(flat: Flat) -> list[_Form]:
    return [
        _Form(name, *leaf_bytes.form_of(leaf), as_sharded(leaf) if is_sharded(leaf) else None)
        for name, leaf in flat.leaves.items()
    ]


def _hash(state: Sequence[_Form], own: Sequence[_Form], rank: int, world: int) -> str:
    shapes = [
        [form.name, form.dtype, form.shape, *_place(form.piece)]
        for forms in (state, own)
        for form in forms
    ]
    text = json.dumps([rank, world, len(state), shapes])
    return hashlib.sha256(text.encode()).hexdigest()


def _place(piece: Sharded | None) -> list[Any]:
    return [] if piece is None else [piece.shape, piece.start, piece.copy, piece.copies]


def _uploader(form: _Form, rank: int) -> int:
    """Of the ranks with the same piece one uploads it, in turn by name."""
    assert form.piece is not None
    chosen = zlib.crc32(f"{form.name} {form.piece.start}".encode()) % form.piece.copies
    return rank if chosen == form.piece.copy else -1


def _extent(form: _Form, kind: Kind, owner: int, offset: int) -> Extent:
    return Extent(
        name=form.name,
        kind=kind,
        owner=owner,
        dtype=form.dtype,
        shape=form.piece.box.shape if form.piece else form.shape,
        offset=offset,
        nbytes=form.nbytes,
        whole=form.piece.shape if form.piece else (),
        start=form.piece.start if form.piece else (),
    )
