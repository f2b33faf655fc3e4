"""Which bytes a rank stages, where they lie in its arena, and which rank uploads them."""

import hashlib
import heapq
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from checkpointing import leaves as leaf_bytes
from checkpointing.extents import (
    LOCAL,
    REPLICA,
    SHARD,
    Extent,
    Extents,
    Form,
    Place,
    counts_of_blocks,
    join,
)
from checkpointing.sharded import Sharded, as_sharded, is_sharded
from checkpointing.tree import Flat, Node, flatten, unflatten

__all__ = ["Extent", "Flat", "Node", "Plan", "flatten", "make_plan", "owners", "unflatten"]

ALIGN: Final = 4096
SMALL_ALIGN: Final = 64  # of what is smaller than `ALIGN`: a page for each would be mostly gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where each leaf of a state goes; the same for all states of one structure.

    Attributes:
        structure: Hash of names, dtypes, shapes, rank and world.
        extents: In order of their offsets, CRCs not filled in.
        data_nbytes: Length of the extent area.
    """

    structure: str
    extents: Extents
    data_nbytes: int


def owners(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """Spread names over ranks so that the bytes are balanced; the same on every rank."""
    if world == 1:
        return dict.fromkeys(sizes, 0)
    load = [(0, rank) for rank in range(world)]
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        nbytes, rank = load[0]
        chosen[name] = rank
        heapq.heapreplace(load, (nbytes + sizes[name], rank))
    return chosen


def structure_hash(replica: Flat, local: Flat, rank: int, world: int) -> str:
    """Hash everything that a plan depends on."""
    return _hash(_look_at(replica), _look_at(local), rank, world)


def make_plan(replica: Flat, local: Flat, rank: int, world: int) -> Plan:
    """Lay out a state: first what this rank uploads, then what others do.

    Raises:
        TypeError: The rank's own state holds a piece of a tensor that is spread over the ranks.
    """
    state, own = _look_at(replica), _look_at(local)
    if own.pieces:
        odd = own.names[min(own.pieces)]
        raise TypeError(f"{odd}: a piece of a sharded tensor belongs to the state, not to `local`")
    found = join([_extents(state, REPLICA, rank, world), _extents(own, LOCAL, rank, world)])
    # A stable order: pieces, then what is replicated, then this rank's own, as they were found.
    rest = (found.owner != rank).astype(np.int8) * 4
    kinds = np.array([1, 0, 2], np.int8)[found.kind]
    ordered = found.rows(np.argsort(rest + kinds, kind="stable"))
    offsets, end = _offsets(ordered.nbytes.tolist())
    return Plan(
        structure=_hash(state, own, rank, world),
        extents=ordered.with_columns(offset=np.array(offsets, np.int64)),
        data_nbytes=-(-end // ALIGN) * ALIGN,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaves:
    """What a plan has to know of the leaves of a state.

    Attributes:
        names: One for each.
        form: Numbers in `forms`.
        forms: The different ones.
        pieces: Of those that are pieces, by number.
    """

    names: list[str]
    form: list[int]
    forms: list[Form]
    pieces: dict[int, Sharded]


def _look_at(flat: Flat) -> _Leaves:
    seen: dict[tuple[Any, Any], int] = {}
    forms: dict[Form, int] = {}
    pieces: dict[int, Sharded] = {}
    numbers = []
    for number, leaf in enumerate(flat.leaves.values()):
        held = leaf
        if is_sharded(leaf):
            pieces[number] = as_sharded(leaf)
            held = pieces[number].local
        like = held.dtype, held.shape
        form = seen.get(like)
        if form is None:
            form = forms.setdefault(Form(*leaf_bytes.form_of(held)), len(forms))
            seen[like] = form
        numbers.append(form)
    return _Leaves(names=list(flat.leaves), form=numbers, forms=list(forms), pieces=pieces)


def _hash(state: _Leaves, own: _Leaves, rank: int, world: int) -> str:
    held = [
        [half.names, half.form, half.forms, [(n, _place(p)) for n, p in half.pieces.items()]]
        for half in (state, own)
    ]
    return hashlib.sha256(json.dumps([rank, world, held]).encode()).hexdigest()


def _place(piece: Sharded) -> list[Any]:
    return [piece.shape, piece.start, piece.copy, piece.copies]


def _extents(leaves: _Leaves, kind: int, rank: int, world: int) -> Extents:
    """Return one half of a state, not laid out yet."""
    count, names, pieces = len(leaves.names), leaves.names, leaves.pieces
    owner, kinds = [rank] * count, np.full(count, kind, np.uint8)
    place, places = np.full(count, -1, np.int32), dict[Place, int]()
    for number, piece in pieces.items():
        owner[number] = _uploader(names[number], piece, rank)
        place[number] = places.setdefault(Place(piece.shape, piece.start), len(places))
    if kind == REPLICA:
        kinds[list(pieces)] = SHARD
        sizes = [leaves.forms[form].nbytes for form in leaves.form]
        whole = {n: names[n] for n in range(count) if n not in pieces}
        chosen = owners({name: sizes[n] for n, name in whole.items()}, world)
        for number, name in whole.items():
            owner[number] = chosen[name]
    form = np.array(leaves.form, np.int32)
    nbytes = np.array([one.nbytes for one in leaves.forms], np.int64)[form]
    return Extents(
        names=names,
        kind=kinds,
        form=form,
        place=place,
        owner=np.array(owner, np.int32),
        offset=np.zeros(count, np.int64),
        crc64=np.zeros(count, np.uint64),
        block_counts=counts_of_blocks(kinds, nbytes),
        blocks=np.empty(0, np.uint64),
        forms=leaves.forms,
        places=list(places),
    )


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for nbytes in sizes:
        align = ALIGN if nbytes >= ALIGN else SMALL_ALIGN
        end = -(-end // align) * align
        offsets.append(end)
        end += nbytes
    return offsets, end


def _uploader(name: str, piece: Sharded, rank: int) -> int:
    """Of the ranks with the same piece one uploads it, in turn by name."""
    chosen = zlib.crc32(f"{name} {piece.start}".encode()) % piece.copies
    return rank if chosen == piece.copy else -1
