"""Where the bytes of a checkpoint are read from, each extent checked by its CRC on the way."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from checkpointing.checksum import combine, crc64
from checkpointing.errors import RestoreFailed
from checkpointing.leaves import Bytes
from checkpointing.plan import Extent
from checkpointing.stage.arena import MappedArena, StagedSlot
from checkpointing.stage.writer import Meta
from checkpointing.store.base import ObjectStore

_THREADS: Final = 8
_PIECE: Final = 32 << 20
_SMALL: Final = 8 << 20  # cheaper to copy once more than to ask for alone
_RUN: Final = 16 << 20
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


def fill_from_store(store: ObjectStore, wanted: Iterable[Wanted]) -> None:
    """Fill everything by parallel ranged reads: large extents in pieces, small ones together.

    Raises:
        RestoreFailed: Bytes do not have the CRC that was recorded for them.
        StoreError: The store could not deliver.
    """
    small: list[Wanted] = []
    large: list[Wanted] = []
    for item in wanted:
        if item.extent.nbytes:
            (large if item.extent.nbytes > _SMALL else small).append(item)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="restore") as pool:
        runs = [pool.submit(_fill_run, store, run) for run in _runs(small)]
        pieces = [
            [pool.submit(_fill_piece, store, item, start) for start in _starts(item)]
            for item in large
        ]
        try:
            for future in runs:
                future.result()
            for item, futures in zip(large, pieces, strict=True):
                _check(item, combine(future.result() for future in futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _starts(item: Wanted) -> range:
    return range(0, item.extent.nbytes, _PIECE)


def _fill_piece(store: ObjectStore, item: Wanted, start: int) -> tuple[int, int]:
    piece = item.out[start : start + _PIECE]
    store.read_into(item.key, item.extent.offset + start, piece.data)
    return crc64(piece.data), piece.nbytes


def _fill_run(store: ObjectStore, run: Sequence[Wanted]) -> None:
    first, last = run[0].extent, run[-1].extent
    block = np.empty(last.offset + last.nbytes - first.offset, dtype=np.uint8)
    store.read_into(run[0].key, first.offset, block.data)
    for item in run:
        start = item.extent.offset - first.offset
        np.copyto(item.out, block[start : start + item.extent.nbytes])
        _check(item, crc64(item.out.data))


def _runs(items: Iterable[Wanted]) -> list[list[Wanted]]:
    """Group small neighbours in one object."""
    runs: list[list[Wanted]] = []
    for item in sorted(items, key=lambda item: (item.key, item.extent.offset)):
        if runs:
            first, last = runs[-1][0], runs[-1][-1]
            adjacent = last.extent.offset + last.extent.nbytes == item.extent.offset
            length = item.extent.offset + item.extent.nbytes - first.extent.offset
            if item.key == first.key and adjacent and length <= _RUN:
                runs[-1].append(item)
                continue
        runs.append([item])
    return runs


def _check(item: Wanted, crc: int) -> None:
    if crc != item.extent.crc64:
        raise RestoreFailed(
            f"{item.extent.name}: its bytes in {item.key} fail their CRC "
            f"({crc:016x}, recorded {item.extent.crc64:016x})"
        )
