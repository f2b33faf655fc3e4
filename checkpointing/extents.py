"""The places of tensors, by the hundred thousand: columns in memory, an object when asked for."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Any, Final, Literal, NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from checkpointing import leaves as leaf_bytes
from checkpointing.boxes import Box, whole

Kind = Literal["replica", "shard", "local"]
KINDS: Final[tuple[Kind, ...]] = ("replica", "shard", "local")
REPLICA, SHARD, LOCAL = range(len(KINDS))


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
        blocks: CRC64NVME of each `leaves.BLOCK` bytes of a larger one, for who reads a part; ()
            for a `local` one, and where they are not known.
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


class Form(NamedTuple):
    """What many tensors have in common."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Place(NamedTuple):
    """Where a piece lies: shape of the whole, and where it begins in that."""

    whole: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Extents(Sequence[Extent]):
    """Many extents. Nothing of it is ever changed; what changes a column gives new ones.

    Attributes:
        names: One for each.
        kind: Numbers in `KINDS`.
        form: Numbers in `forms`.
        place: Numbers in `places`, -1 for what is no shard.
        owner: As in `Extent`.
        offset: As in `Extent`.
        crc64: As in `Extent`.
        block_counts: How many sums of blocks each has, once they are known.
        blocks: Those sums, one after the other; empty while they are not known.
        forms: The different ones.
        places: The different ones.
    """

    names: list[str]
    kind: NDArray[np.uint8]
    form: NDArray[np.int32]
    place: NDArray[np.int32]
    owner: NDArray[np.int32]
    offset: NDArray[np.int64]
    crc64: NDArray[np.uint64]
    block_counts: NDArray[np.int64]
    blocks: NDArray[np.uint64]
    forms: list[Form]
    places: list[Place]

    @classmethod
    def of(cls, extents: Iterable[Extent]) -> "Extents":
        """Return them as columns."""
        if isinstance(extents, Extents):
            return extents
        rows = list(extents)
        forms: dict[Form, int] = {}
        places: dict[Place, int] = {}
        form = [forms.setdefault(Form(e.dtype, tuple(e.shape), e.nbytes), len(forms)) for e in rows]
        place = [
            places.setdefault(Place(e.whole, e.start), len(places)) if e.kind == "shard" else -1
            for e in rows
        ]
        return cls(
            names=[e.name for e in rows],
            kind=np.array([KINDS.index(e.kind) for e in rows], np.uint8),
            form=np.array(form, np.int32),
            place=np.array(place, np.int32),
            owner=np.array([e.owner for e in rows], np.int32),
            offset=np.array([e.offset for e in rows], np.int64),
            crc64=np.array([e.crc64 for e in rows], np.uint64),
            block_counts=np.array([len(e.blocks) for e in rows], np.int64),
            blocks=np.array([sum_ for e in rows for sum_ in e.blocks], np.uint64),
            forms=list(forms),
            places=list(places),
        )

    @property
    def nbytes(self) -> NDArray[np.int64]:
        """Length of each."""
        return np.array([form.nbytes for form in self.forms], np.int64)[self.form]

    def rows(self, mask: NDArray[np.bool_] | NDArray[np.intp]) -> "Extents":
        """Return some of them, in this order."""
        if mask.dtype == np.bool_ and mask.all():
            return self
        numbers = np.flatnonzero(mask) if mask.dtype == np.bool_ else mask
        names, counts, blocks = self.names, self.block_counts[numbers], self.blocks
        if blocks.size:
            starts = (np.cumsum(self.block_counts) - self.block_counts)[numbers]
            before = np.cumsum(counts) - counts
            blocks = blocks[np.repeat(starts - before, counts) + np.arange(counts.sum())]
        return self.with_columns(
            names=[names[n] for n in numbers.tolist()],
            kind=self.kind[numbers],
            form=self.form[numbers],
            place=self.place[numbers],
            owner=self.owner[numbers],
            offset=self.offset[numbers],
            crc64=self.crc64[numbers],
            block_counts=counts,
            blocks=blocks,
        )

    def with_columns(self, **columns: Any) -> Self:
        """Return the same with other columns."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{**held, **columns})

    def with_own_tables(self) -> "Extents":
        """Return the same with no forms and places but those that occur."""
        forms, form = _occurring(self.form, len(self.forms))
        places, place = _occurring(self.place, len(self.places))
        return self.with_columns(
            form=form,
            place=place,
            forms=[self.forms[n] for n in forms],
            places=[self.places[n] for n in places],
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, number: int) -> Extent: ...
    @overload
    def __getitem__(self, number: slice) -> "Extents": ...
    def __getitem__(self, number: int | slice) -> "Extent | Extents":
        picked = np.arange(len(self.names))[number]
        if isinstance(number, slice):
            return self.rows(picked)
        return next(iter(self.rows(np.array([picked], np.intp))))

    def __iter__(self) -> Iterator[Extent]:
        none: Iterator[tuple[int, ...]] = repeat(())
        for name, kind, form, place, owner, offset, crc, blocks in zip(
            self.names,
            self.kind.tolist(),
            self.form.tolist(),
            self.place.tolist(),
            self.owner.tolist(),
            self.offset.tolist(),
            self.crc64.tolist(),
            self._each_blocks() if self.blocks.size else none,
            strict=False,
        ):
            whole_, start = self.places[place] if place >= 0 else ((), ())
            dtype, shape, nbytes = self.forms[form]
            yield Extent(
                name=name,
                kind=KINDS[kind],
                owner=owner,
                dtype=dtype,
                shape=shape,
                offset=offset,
                nbytes=nbytes,
                crc64=crc,
                whole=whole_,
                start=start,
                blocks=blocks,
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _each_blocks(self) -> Iterator[tuple[int, ...]]:
        at = 0
        for count in self.block_counts.tolist():
            yield tuple(self.blocks[at : at + count].tolist()) if count else ()
            at += count


def _occurring(numbers: NDArray[np.int32], most: int) -> tuple[list[int], NDArray[np.int32]]:
    """Return which numbers below `most` occur, and the numbers of those instead; -1 stays."""
    occurs = np.zeros(most + 1, np.bool_)
    occurs[numbers] = True  # -1 is the last one
    occurs[most] = False
    fresh = np.cumsum(occurs, dtype=np.int32) - 1
    fresh[most] = -1
    return np.flatnonzero(occurs).tolist(), fresh[numbers]


def counts_of_blocks(
    kind: NDArray[np.uint8], nbytes: NDArray[np.int64], kinds: Collection[int] = (REPLICA, SHARD)
) -> NDArray[np.int64]:
    """Return how many blocks extents of these kinds and sizes have, if it is one of `kinds`.

    What is a rank's own is only ever read whole.
    """
    is_large = np.isin(kind, list(kinds)) & (nbytes > leaf_bytes.BLOCK)
    return np.where(is_large, -(-nbytes // leaf_bytes.BLOCK), 0)


def shared(several: Sequence[Extents]) -> list[Extents]:
    """Return the same extents with one table of forms and one of places for all of them."""
    forms: dict[Form, int] = {}
    places: dict[Place, int] = {}
    found = []
    for one in several:
        form = np.array([forms.setdefault(f, len(forms)) for f in one.forms], np.int32)
        # The last one is for -1, which is no place.
        place = [places.setdefault(p, len(places)) for p in one.places]
        at = np.array([*place, -1], np.int32)
        found.append(one.with_columns(form=form[one.form], place=at[one.place]))
    all_forms, all_places = list(forms), list(places)
    return [one.with_columns(forms=all_forms, places=all_places) for one in found]


def join(several: Sequence[Extents]) -> Extents:
    """Return all of them, one after the other."""
    alike = shared(several)
    if not alike:
        return Extents.of(())
    columns = ("kind", "form", "place", "owner", "offset", "crc64", "block_counts", "blocks")
    return alike[0].with_columns(
        names=[name for one in alike for name in one.names],
        **{name: np.concatenate([getattr(one, name) for one in alike]) for name in columns},
    )
