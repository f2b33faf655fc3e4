"""Where the bytes of a checkpoint are read from, each extent checked by its CRC on the way."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from checkpointing.boxes import Box, row_range, split, whole
from checkpointing.checksum import combine, crc64
from checkpointing.errors import CheckpointDamaged
from checkpointing.extents import KINDS
from checkpointing.leaves import BLOCK, Bytes, combined, copy_and_sum
from checkpointing.rows import Item, Part, Wanted, check, rows, take
from checkpointing.sealed import twice
from checkpointing.small import Small, runs
from checkpointing.stage.arena import MappedArena, StagedSlot
from checkpointing.stage.crew import Crew, Task
from checkpointing.stage.writer import Meta
from checkpointing.store.base import ObjectStore

__all__ = ["ArenaSource", "Part", "Wanted", "fill_from_store"]

_BATCH: Final = 1024
_THREADS: Final = 8
_LARGEST_READ: Final = 64 << 20
_SMALL: Final = 8 << 20  # cheaper to copy once more than to ask for alone


class ArenaSource:
    """A slot of the rank's own arena."""

    def __init__(self, arena: MappedArena, staged: StagedSlot) -> None:
        self.meta = Meta.read(arena, staged.index)
        self._data = np.frombuffer(arena.data(staged.index), dtype=np.uint8)
        extents = self.meta.extents
        places = zip(extents.kind.tolist(), extents.names, strict=True)
        self._lines = {place: line for line, place in enumerate(places)}
        self._offsets: list[int] = extents.offset.tolist()
        self._sizes: list[int] = extents.nbytes.tolist()
        self._sums: list[int] = extents.crc64.tolist()

    def fill(self, wanted: Sequence[Wanted], crew: Crew) -> list[Wanted]:
        """Copy the extents of which the arena holds the same bytes; return the others."""
        tasks: list[Task] = []
        found: list[list[int] | None] = []
        for item in wanted:
            extent = item.extent
            offset = self._find(KINDS.index(extent.kind), extent.name, extent.nbytes, extent.crc64)
            if offset is None:
                found.append(None)
                continue
            source = self._data[offset : offset + extent.nbytes]
            starts = range(0, extent.nbytes, BLOCK)
            sums = [0] * len(starts)
            tasks += [partial(_copy_block, source, item.out, start, sums) for start in starts]
            found.append(sums)
        crew.run(tasks)
        return [
            item
            for item, blocks in zip(wanted, found, strict=True)
            if blocks is None or combined(blocks, item.extent.nbytes) != item.extent.crc64
        ]

    def fill_small(self, small: Small, crew: Crew) -> Small:
        """Do the same with small extents."""
        is_missing = np.ones(len(small.addresses), np.bool_)
        starts = range(0, len(is_missing), _BATCH)
        crew.run([partial(self._copy_small, small, start, is_missing) for start in starts])
        return small.rows(np.flatnonzero(is_missing))

    def _copy_small(self, small: Small, start: int, is_missing: NDArray[np.bool_]) -> None:
        extents, addresses, copy = small.extents, small.addresses, ctypes.memmove
        view, base = self._data.data, int(self._data.ctypes.data)
        some = slice(start, start + _BATCH)
        columns = (extents.kind, extents.nbytes, extents.crc64)
        kinds, sizes, sums = (column[some].tolist() for column in columns)
        rows = zip(kinds, extents.names[some], sizes, sums, addresses[some], strict=True)
        for number, (kind, name, nbytes, crc, address) in enumerate(rows, start=start):
            offset = self._find(kind, name, nbytes, crc)
            if offset is not None:
                copy(address, base + offset, nbytes)
                is_missing[number] = crc64(view[offset : offset + nbytes]) != crc

    def _find(self, kind: int, name: str, nbytes: int, crc: int) -> int | None:
        """Return where the bytes of an extent lie, None when others or none are held."""
        line = self._lines.get((kind, name))
        if line is None or (self._sizes[line], self._sums[line]) != (nbytes, crc):
            return None
        offset = self._offsets[line]
        return offset if 0 <= offset <= self._data.nbytes - nbytes else None


def _copy_block(source: Bytes, out: Bytes, start: int, sums: list[int]) -> None:
    end = start + BLOCK
    sums[start // BLOCK] = copy_and_sum(source[start:end], out[start:end])


def fill_from_store(
    store: ObjectStore,
    wanted: Iterable[Wanted],
    parts: Iterable[Part] = (),
    small: Iterable[Small] = (),
) -> None:
    """Fill everything by parallel ranged reads: neighbours together, large extents in pieces.

    Of a part are read the blocks that it lies in, since a CRC is known of each of those.

    Raises:
        CheckpointDamaged: Bytes do not have the CRC that was recorded for them.
        StoreError: The store could not deliver.
    """
    jobs = _jobs(wanted, parts)
    between: dict[str, list[int]] = {}
    for item in jobs.rows:
        between.setdefault(item.key, []).append(item.begin)
    together = [run for one in small for run in runs(one, between)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="restore") as pool:
        try:
            parts = [part for one in jobs.parts for part in _cut(one)]
            cut = [pool.submit(twice, partial(_fill_part, store, part)) for part in parts]
            _fill_rows(store, pool, [*jobs.rows, *together])
            for future in cut:
                future.result()
            for shared in _by_extent(jobs.alone):
                _fill_whole(store, pool, shared)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(frozen=True, slots=True)
class _Jobs:
    """What is read how.

    Attributes:
        rows: Extents that are read whole, with their neighbours.
        parts: Some blocks of large extents.
        alone: Parts of large extents of which no blocks are known: read whole, one after another.
    """

    rows: list[Wanted | Part]
    parts: list[Part]
    alone: list[Part]


def _jobs(wanted: Iterable[Wanted], parts: Iterable[Part]) -> _Jobs:
    jobs = _Jobs([], [], [])
    for item in (*wanted, *map(_straight, parts)):
        if not item.extent.nbytes:
            continue
        if isinstance(item, Wanted) or item.extent.nbytes <= _SMALL:
            jobs.rows.append(item)
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


def _fill_rows(store: ObjectStore, pool: ThreadPoolExecutor, items: Iterable[Item]) -> None:
    """Read items with their neighbours; what fails its CRC once more."""
    for item, _ in _failed(store, pool, items):
        for again, crc in _failed(store, pool, [item]):
            check(again, crc)


def _failed(
    store: ObjectStore, pool: ThreadPoolExecutor, items: Iterable[Item]
) -> list[tuple[Wanted, int]]:
    """Read items; return those that are read in pieces and have another CRC, with that."""
    found = rows(items)
    for future in [pool.submit(twice, partial(row.read, store)) for row in found]:
        future.result()
    sums: dict[int, list[tuple[int, int]]] = {}
    wanted: dict[int, Wanted] = {}
    for row in found:
        for piece in row.pieces:
            wanted[id(piece.item)] = piece.item
            sums.setdefault(id(piece.item), []).append((piece.crc64, piece.nbytes))
    crcs = [(item, combine(sums[number])) for number, item in wanted.items()]
    return [(item, crc) for item, crc in crcs if crc != item.extent.crc64]


def _cut(part: Part) -> Iterator[Part]:
    """Cut a part by its rows, so that no read takes much memory."""
    first, last = row_range(part.box, part.extent.shape)
    count = part.box.shape[0] if part.box.shape else 1
    if (last - first) * part.out.itemsize <= _LARGEST_READ or count < 2:
        yield part
        return
    start, shape = part.box.start, part.box.shape
    for begin, length in split(count, 2):
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
    take(part, raw, first * size - begin)


def _by_extent(parts: Iterable[Part]) -> Iterable[list[Part]]:
    found: dict[tuple[str, int], list[Part]] = {}
    for part in parts:
        found.setdefault((part.key, part.extent.offset), []).append(part)
    return found.values()


def _fill_whole(store: ObjectStore, pool: ThreadPoolExecutor, parts: Sequence[Part]) -> None:
    """Read an extent for parts of it."""
    extent = parts[0].extent
    raw = np.empty(extent.nbytes, dtype=np.uint8)
    _fill_rows(store, pool, [Wanted(extent=extent, key=parts[0].key, out=raw)])
    for part in parts:
        begin, _ = row_range(part.box, extent.shape)
        take(part, raw, begin * part.out.itemsize)
