"""Which bytes a rank stages, where they lie in its arena, and which rank uploads them."""

import hashlib
import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from checkpointing import leaves as leaf_bytes
from checkpointing.tree import Flat, Node, flatten, unflatten

__all__ = ["Extent", "Flat", "Node", "Plan", "flatten", "make_plan", "owners", "unflatten"]

ALIGN: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One tensor's bytes.

    Attributes:
        name: Path in the state, parts joined by "/".
        kind: `replica`, alike on all ranks, or `local`, this rank's own.
        owner: Rank that uploads it.
        dtype: Name of the element type.
        shape: Shape of the tensor.
        offset: Where it begins: in the slot's extent area, or in an index in the uploaded object
            (-1 there when another rank uploads it).
        nbytes: Length.
        crc64: CRC64NVME of the bytes.
    """

    name: str
    kind: Literal["replica", "local"]
    owner: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc64: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; not by `asdict`, whose deep copies show in the stall of a save."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Extent":
        """Read the JSON form."""
        return cls(**{**fields, "shape": tuple(fields["shape"])})


_FIELDS: Final = tuple(field.name for field in fields(Extent))


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
        [name, leaf_bytes.dtype_of(leaf), leaf_bytes.shape_of(leaf)]
        for flat in (replica, local)
        for name, leaf in flat.leaves.items()
    ]
    text = json.dumps([rank, world, len(replica.leaves), shapes])
    return hashlib.sha256(text.encode()).hexdigest()


def make_plan(replica: Flat, local: Flat, rank: int, world: int) -> Plan:
    """Lay out a state: first what this rank uploads, then what others do."""
    sizes = {name: leaf_bytes.nbytes_of(leaf) for name, leaf in replica.leaves.items()}
    owner = owners(sizes, world)
    mine = [(n, x, "replica", rank) for n, x in replica.leaves.items() if owner[n] == rank]
    own = [(n, x, "local", rank) for n, x in local.leaves.items()]
    rest = [(n, x, "replica", owner[n]) for n, x in replica.leaves.items() if owner[n] != rank]
    extents, offset = [], 0
    for name, leaf, kind, holder in mine + own + rest:
        extent = Extent(
            name=name,
            kind="replica" if kind == "replica" else "local",
            owner=holder,
            dtype=leaf_bytes.dtype_of(leaf),
            shape=leaf_bytes.shape_of(leaf),
            offset=offset,
            nbytes=leaf_bytes.nbytes_of(leaf),
        )
        extents.append(extent)
        offset += -(-extent.nbytes // ALIGN) * ALIGN
    return Plan(
        structure=structure_hash(replica, local, rank, world),
        extents=tuple(extents),
        data_nbytes=offset,
    )
