"""Rows of an object's bytes, each read by one request and straight into place."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from checkpointing.boxes import Box, row_range
from checkpointing.checksum import crc64
from checkpointing.leaves import CHUNK, Bytes
from checkpointing.plan import Extent
from checkpointing.small import Run, damaged
from checkpointing.store.base import ObjectStore

_LONGEST: Final = 32 << 20
_GAP: Final = 1 << 20  # cheaper to read than to skip
_DIRECT: Final = 256 << 10  # of what is smaller many are read at once, and copied
_MOST_COPIED: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """An extent in its object."""

    extent: Extent
    key: str

    @property
    def begin(self) -> int:
        """Where its extent begins in the object."""
        return self.extent.offset

    @property
    def end(self) -> int:
        """Where its extent ends in the object."""
        return self.extent.offset + self.extent.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(_Stored):
    """One extent and the memory that it shall fill.

    Attributes:
        extent: What is read; its offset is that in the source.
        key: Object that holds it, when the source is a store.
        out: Its destination: `extent.nbytes` long.
    """

    out: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(_Stored):
    """Some of a stored piece of a tensor, and where it shall go.

    Attributes:
        extent: The stored piece.
        key: Object that holds it.
        box: What is wanted of it, in its own coordinates.
        out: Array of raw items with the shape of `box`, in any strides.
    """

    box: Box
    out: NDArray[np.void]


Item = Wanted | Part | Run


@dataclass(slots=True)
class Piece:
    """Bytes of an extent that go into place without a copy; the CRC of what is there."""

    item: Wanted
    start: int
    nbytes: int
    crc64: int = 0


@dataclass(slots=True)
class _Stretch:
    """Bytes that go to one place: a piece, or a buffer that items are copied from."""

    begin: int
    end: int
    piece: Piece | None = None
    items: list[Item] = field(default_factory=list)


class Row:
    """Neighbours in one object.

    Args:
        key: The object.
        begin: Where the first byte is.
    """

    def __init__(self, key: str, begin: int) -> None:
        self._key = key
        self._begin = self._end = begin
        self._stretches: list[_Stretch] = []

    @property
    def pieces(self) -> list[Piece]:
        """What is not copied."""
        return [stretch.piece for stretch in self._stretches if stretch.piece is not None]

    def room(self, key: str, offset: int) -> int:
        """Return how many bytes from this offset on it can still take as a piece."""
        is_next = key == self._key and self._end <= offset <= self._end + _GAP
        return max(0, self._begin + _LONGEST - offset) if is_next else 0

    def add_piece(self, item: Wanted, start: int, nbytes: int) -> None:
        """Take a piece that there is room for."""
        offset = item.extent.offset + start
        if offset > self._end:
            self._buffer().end = offset
        piece = Piece(item, start, nbytes)
        self._stretches.append(_Stretch(offset, offset + nbytes, piece))
        self._end = offset + nbytes

    def add_copied(self, item: Item) -> bool:
        """Take an item that is copied, if it fits; they may overlap each other."""
        offset, last = item.begin, self._stretches[-1] if self._stretches else None
        stop = item.end
        is_same = last is not None and last.piece is None and last.begin <= offset
        is_next = self._end <= offset <= self._end + _GAP or (is_same and offset <= self._end)
        copied = sum(s.end - s.begin for s in self._stretches if s.piece is None)
        is_little = not copied or copied + max(0, stop - self._end) <= _MOST_COPIED
        is_short = not self._stretches or stop - self._begin <= _LONGEST
        if item.key != self._key or not (is_next and is_little and is_short):
            return False
        stretch = self._buffer()
        stretch.items.append(item)
        stretch.end = self._end = max(stop, self._end)
        return True

    def read(self, store: ObjectStore) -> None:
        """Fill everything; what was copied is checked, of the others the CRC is in `pieces`.

        Raises:
            CheckpointDamaged: Bytes do not have their CRC.
            StoreError: The store could not deliver.
        """
        outs: list[memoryview] = []
        pieces: list[Piece | None] = []
        buffers: list[tuple[_Stretch, Bytes]] = []
        for stretch in self._stretches:
            if (piece := stretch.piece) is None:
                buffers.append((stretch, np.empty(stretch.end - stretch.begin, np.uint8)))
                outs.append(buffers[-1][1].data)
                pieces.append(None)
                continue
            piece.crc64 = 0
            out = piece.item.out[piece.start : piece.start + piece.nbytes].data
            cuts = range(0, piece.nbytes, CHUNK)
            outs += [out[at : at + CHUNK] for at in cuts]
            pieces += [piece] * len(cuts)

        def arrived(number: int) -> None:
            piece = pieces[number]
            if piece is not None:  # summed while it is in the cache
                piece.crc64 = crc64(outs[number], piece.crc64)

        store.read_each(self._key, self._begin, outs, arrived)
        for stretch, raw in buffers:
            for item in stretch.items:
                _deliver(item, raw[item.begin - stretch.begin : item.end - stretch.begin])

    def _buffer(self) -> _Stretch:
        if not self._stretches or self._stretches[-1].piece is not None:
            self._stretches.append(_Stretch(self._end, self._end))
        return self._stretches[-1]


def rows(items: Iterable[Item]) -> list[Row]:
    """Group neighbours, and cut what is too long for one request."""
    found: list[Row] = []
    for item in sorted(items, key=lambda item: (item.key, item.begin)):
        if not isinstance(item, Wanted) or item.extent.nbytes <= _DIRECT:
            if not (found and found[-1].add_copied(item)):
                found.append(Row(item.key, item.begin))
                found[-1].add_copied(item)
            continue
        extent, at = item.extent, 0
        while at < extent.nbytes:
            offset, left = extent.offset + at, extent.nbytes - at
            room = found[-1].room(item.key, offset) if found else 0
            if room < min(left, _DIRECT):
                found.append(Row(item.key, offset))
                room = _LONGEST
            found[-1].add_piece(item, at, min(left, room))
            at += min(left, room)
    return found


def take(part: Part, raw: Bytes, offset: int) -> None:
    """Copy a part out of bytes of its extent; its first element is at `offset` in those."""
    shape, size = part.extent.shape, part.out.itemsize
    strides = tuple(size * math.prod(shape[n + 1 :]) for n in range(len(shape)))
    part.out[...] = np.ndarray(
        part.box.shape, dtype=part.out.dtype, buffer=raw.data, offset=offset, strides=strides
    )


def check(item: Wanted | Part, crc: int) -> None:
    """Compare the CRC of what was read.

    Raises:
        CheckpointDamaged: It is not the one that was recorded.
    """
    if crc != item.extent.crc64:
        raise damaged(item.extent.name, item.key, crc, item.extent.crc64)


def _deliver(item: Item, raw: Bytes) -> None:
    if isinstance(item, Run):
        item.deliver(raw)
        return
    check(item, crc64(raw.data))
    if isinstance(item, Wanted):
        np.copyto(item.out, raw)
    else:
        begin, _ = row_range(item.box, item.extent.shape)
        take(item, raw, begin * item.out.itemsize)
