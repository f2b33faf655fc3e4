"""Where the bytes of a checkpoint are read from, each extent checked by its CRC on the way."""

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from checkpointing.boxes import Box, row_range, split, whole
from checkpointing.checksum import combine, crc64
from checkpointing.errors import CheckpointDamaged
from checkpointing.leaves import BLOCK, Bytes
from checkpointing.plan import Extent
from checkpointing.sealed import twice
from checkpointing.stage.arena import MappedArena, StagedSlot
from checkpointing.stage.writer import Meta
from checkpointing.store.base import ObjectStore

_THREADS: Final = 8
_PIECE: Final = 32 << 20
_SMALL: Final = 8 << 20  # cheaper to copy once more than to ask for alone
_RUN: Final = 16 << 20
_GAP: Final = 1 << 20
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One extent and the memory that it shall fill.

    Attributes:
        extent: What is read; its offset is that in the source.
        key: Object that holds it, when the source is a store.
        out: Its destination: `extent.nbytes` long.
    """

    extent: Extent
    key: str
    out: Bytes


class ArenaSource:
    """A slot of the rank's own arena."""

    def __init__(self, arena: MappedArena, staged: StagedSlot) -> None:
        self.meta = Meta.read(arena, staged.index)
        self._data = np.frombuffer(arena.data(staged.index), dtype=np.uint8)
        self._extents = {(extent.kind, extent.name): extent for extent in self.meta.extents}

    def fill(self, wanted: Wanted) -> bool:
        """Copy an extent if the arena holds the same bytes; tell whether it did."""
        held = self._extents.get((wanted.extent.kind, wanted.extent.name))
        if held is None or held.crc64 != wanted.extent.crc64 or held.nbytes != wanted.extent.nbytes:
            return False
        source = self._data[held.offset : held.offset + held.nbytes]
        crc = 0
        for start in range(0, held.nbytes, _CHUNK):
            piece = wanted.out[start : start + _CHUNK]
            np.copyto(piece, source[start : start + _CHUNK])
            crc = crc64(piece.data, crc)
        return crc == wanted.extent.crc64


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of a stored piece of a tensor, and where it shall go.

    Attributes:
        extent: The stored piece.
        key: Object that holds it.
        box: What is wanted of it, in its own coordinates.
        out: Array of raw items with the shape of `box`, in any strides.
    """

    extent: Extent
    key: str
    box: Box
    out: NDArray[np.void]


def fill_from_store(
    store: ObjectStore, wanted: Iterable[Wanted], parts: Iterable[Part] = ()
) -> None:
    """Fill everything by parallel ranged reads: large extents in pieces, small ones together.

    Of a part are read the blocks that it lies in, since a CRC is known of each of those.

    Raises:
        CheckpointDamaged: Bytes do not have the CRC that was recorded for them.
        StoreError: The store could not deliver.
    """
    jobs = _jobs(wanted, parts)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="restore") as pool:
        runs = [pool.submit(twice, partial(_fill_run, store, r)) for r in _runs(jobs.together)]
        cut = (part for one in jobs.parts for part in _cut(one))
        runs += [pool.submit(twice, partial(_fill_part, store, part)) for part in cut]
        large = [_Large(store, pool, item) for item in jobs.large]
        try:
            for future in runs:
                future.result()
            for one in large:
                one.join()
            for shared in _by_extent(jobs.alone):
                _fill_whole(store, pool, shared)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(frozen=True, slots=True)
class _Jobs:
    """What is read how.

    Attributes:
        together: Extents that are read whole, with their neighbours.
        large: Extents that are read in pieces, straight into place.
        parts: Some blocks of large extents.
        alone: Parts of large extents of which no blocks are known: read whole, one after another.
    """

    together: list[Wanted | Part]
    large: list[Wanted]
    parts: list[Part]
    alone: list[Part]


def _jobs(wanted: Iterable[Wanted], parts: Iterable[Part]) -> _Jobs:
    jobs = _Jobs([], [], [], [])
    for item in (*wanted, *map(_straight, parts)):
        if not item.extent.nbytes:
            continue
        if item.extent.nbytes <= _SMALL:
            jobs.together.append(item)
        elif isinstance(item, Wanted):
            jobs.large.append(item)
        elif item.extent.blocks or item.extent.nbytes <= BLOCK:
            jobs.parts.append(item)
        else:
            jobs.alone.append(item)
    return jobs


def _straight(part: Part) -> Wanted | Part:
    """Return a part that is all of its extent, in a row, as something to be filled directly."""
    if part.box != whole(part.extent.shape) or not part.out.flags.c_contiguous:
        return part
    out = part.out.reshape(-1).view(np.uint8)
    return Wanted(extent=part.extent, key=part.key, out=out)


def _cut(part: Part) -> Iterator[Part]:
    """Cut a part by its rows, so that no read takes much memory."""
    first, last = row_range(part.box, part.extent.shape)
    rows = part.box.shape[0] if part.box.shape else 1
    if (last - first) * part.out.itemsize <= 2 * _PIECE or rows < 2:
        yield part
        return
    start, shape = part.box.start, part.box.shape
    for begin, length in split(rows, 2):
        box = Box((start[0] + begin, *start[1:]), (length, *shape[1:]))
        yield from _cut(replace(part, box=box, out=part.out[begin : begin + length]))


def _fill_part(store: ObjectStore, part: Part) -> None:
    extent, size = part.extent, part.out.itemsize
    first, last = row_range(part.box, extent.shape)
    begin = first * size // BLOCK * BLOCK
    end = min(-(-last * size // BLOCK) * BLOCK, extent.nbytes)
    raw = np.empty(end - begin, dtype=np.uint8)
    store.read_into(part.key, extent.offset + begin, raw.data)
    sums = extent.blocks or (extent.crc64,)
    for number, at in enumerate(range(0, raw.nbytes, BLOCK), start=begin // BLOCK):
        if crc64(raw[at : at + BLOCK].data) != sums[number]:
            raise CheckpointDamaged(f"{extent.name}: its bytes in {part.key} fail their CRC")
    _take(part, raw, first * size - begin)


def _take(part: Part, raw: Bytes, offset: int) -> None:
    """Copy a part out of bytes of its extent; its first element is at `offset` in those."""
    shape, size = part.extent.shape, part.out.itemsize
    strides = tuple(size * math.prod(shape[n + 1 :]) for n in range(len(shape)))
    part.out[...] = np.ndarray(
        part.box.shape, dtype=part.out.dtype, buffer=raw.data, offset=offset, strides=strides
    )


def _by_extent(parts: Iterable[Part]) -> Iterable[list[Part]]:
    found: dict[tuple[str, int], list[Part]] = {}
    for part in parts:
        found.setdefault((part.key, part.extent.offset), []).append(part)
    return found.values()


def _fill_whole(store: ObjectStore, pool: ThreadPoolExecutor, parts: Sequence[Part]) -> None:
    """Read an extent for parts of it."""
    extent = parts[0].extent
    raw = np.empty(extent.nbytes, dtype=np.uint8)
    item = Wanted(extent=extent, key=parts[0].key, out=raw)
    _Large(store, pool, item).join()
    for part in parts:
        begin, _ = row_range(part.box, extent.shape)
        _take(part, raw, begin * part.out.itemsize)


class _Large:
    """An extent that is read in pieces, all of them begun at once."""

    def __init__(self, store: ObjectStore, pool: ThreadPoolExecutor, item: Wanted) -> None:
        self._store = store
        self._pool = pool
        self._item = item
        self._pieces = self._begin()

    def join(self) -> None:
        """Wait for all pieces; what fails its CRC is read once more."""
        try:
            self._check()
        except CheckpointDamaged:
            self._pieces = self._begin()
            self._check()

    def _begin(self) -> list[Future[tuple[int, int]]]:
        starts = range(0, self._item.extent.nbytes, _PIECE)
        return [self._pool.submit(_fill_piece, self._store, self._item, at) for at in starts]

    def _check(self) -> None:
        _check(self._item, combine(piece.result() for piece in self._pieces))


def _fill_piece(store: ObjectStore, item: Wanted, start: int) -> tuple[int, int]:
    piece = item.out[start : start + _PIECE]
    store.read_into(item.key, item.extent.offset + start, piece.data)
    return crc64(piece.data), piece.nbytes


def _fill_run(store: ObjectStore, run: Sequence[Wanted | Part]) -> None:
    first = run[0].extent
    end = max(item.extent.offset + item.extent.nbytes for item in run)
    block = np.empty(end - first.offset, dtype=np.uint8)
    store.read_into(run[0].key, first.offset, block.data)
    for item in run:
        start = item.extent.offset - first.offset
        raw = block[start : start + item.extent.nbytes]
        _check(item, crc64(raw.data))
        if isinstance(item, Wanted):
            np.copyto(item.out, raw)
        else:
            begin, _ = row_range(item.box, item.extent.shape)
            _take(item, raw, begin * item.out.itemsize)


def _runs(items: Iterable[Wanted | Part]) -> list[list[Wanted | Part]]:
    """Group neighbours in one object; a small gap is cheaper to read than to skip."""
    runs: list[list[Wanted | Part]] = []
    begin = end = 0
    for item in sorted(items, key=lambda item: (item.key, item.extent.offset)):
        stop = item.extent.offset + item.extent.nbytes
        if runs and item.key == runs[-1][0].key:
            is_near = item.extent.offset <= end + _GAP
            if is_near and max(stop, end) - begin <= max(_RUN, end - begin):
                runs[-1].append(item)
                end = max(stop, end)
                continue
        runs.append([item])
        begin, end = item.extent.offset, stop
    return runs


def _check(item: Wanted | Part, crc: int) -> None:
    if crc != item.extent.crc64:
        raise CheckpointDamaged(
            f"{item.extent.name}: its bytes in {item.key} fail their CRC "
            f"({crc:016x}, recorded {item.extent.crc64:016x})"
        )
