"""Copies leaves into a slot and sums them on the way, cut into tasks for several threads."""

import ctypes
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from checkpointing import leaves as leaf_bytes
from checkpointing.checksum import crc64
from checkpointing.extents import Extents
from checkpointing.leaves import Bytes
from checkpointing.stage.crew import Task
from checkpointing.stage.meta import Sums

_LONG_CHUNK: Final = 4 << 20  # beside a training step each turn of a thread costs a wait
_SMALL: Final = 64 << 10
_BATCH: Final = 1024


class Copy:
    """One copy of a state into the extents of a slot.

    Args:
        extents: Where the bytes go.
        leaves: One for each extent.
        out: The slot's extent area.
    """

    def __init__(self, extents: Extents, leaves: Sequence[Any], out: Bytes) -> None:
        self._offsets: list[int] = extents.offset.tolist()
        self._sizes: list[int] = extents.nbytes.tolist()
        self._has_blocks: list[int] = np.flatnonzero(extents.block_counts).tolist()
        self._leaves = leaves
        self._out = out
        self._view = out.data
        self._base = int(out.ctypes.data)
        self._sums = [0] * len(self._sizes)
        self._blocks: dict[int, list[int]] = {}

    def tasks(self, numbers: Iterable[int], *, beside_training: bool = False) -> list[Task]:
        """Return what there is to do for the extents of these numbers."""
        found: list[Task] = []
        small: list[tuple[int, int, int, int]] = []
        chunk = _LONG_CHUNK if beside_training else leaf_bytes.CHUNK
        offsets, sizes, leaves = self._offsets, self._sizes, self._leaves
        for number in numbers:
            nbytes, leaf = sizes[number], leaves[number]
            if 0 < nbytes <= _SMALL and not isinstance(leaf, np.ndarray):
                small.append((number, leaf.data_ptr(), offsets[number], nbytes))
            else:
                found += self._one(number, chunk)
        for start in range(0, len(small), _BATCH):
            found.append(partial(self._copy_small, small[start : start + _BATCH]))
        return found

    def sum_only(self, numbers: Iterable[int]) -> list[Task]:
        """Return tasks that sum what already lies in the slot."""
        found: list[Task] = []
        for number in numbers:
            found += self._blocks_of(number, self.place(number), leaf_bytes.CHUNK)
        return found

    def copy_oddly(self, number: int) -> None:
        """Copy a leaf whose bytes are not in one row, on this thread: torch brings its own."""
        out = self.place(number)
        leaf_bytes.copy_out(self._leaves[number], out)
        for task in self._blocks_of(number, out, leaf_bytes.CHUNK):
            task()

    def result(self) -> Sums:
        """Return the CRCs of all extents, once every task is done."""
        for number, blocks in self._blocks.items():
            self._sums[number] = leaf_bytes.combined(blocks, self._sizes[number])
        kept = [crc for number in self._has_blocks for crc in self._blocks[number]]
        return Sums(self._sums, kept)

    def place(self, number: int) -> Bytes:
        """Return where an extent lies in the slot."""
        offset = self._offsets[number]
        return self._out[offset : offset + self._sizes[number]]

    def _one(self, number: int, chunk: int) -> list[Task]:
        source = leaf_bytes.bytes_of(self._leaves[number])
        assert source is not None
        return self._blocks_of(number, source, chunk)

    def _blocks_of(self, number: int, source: Bytes, chunk: int) -> list[Task]:
        nbytes = self._sizes[number]
        starts = range(0, nbytes, leaf_bytes.BLOCK)
        if nbytes > leaf_bytes.BLOCK:
            self._blocks[number] = [0] * len(starts)
        return [partial(self._copy_block, number, source, start, chunk) for start in starts]

    def _copy_block(self, number: int, source: Bytes, start: int, chunk: int) -> None:
        out = self.place(number)
        end = start + leaf_bytes.BLOCK
        crc = leaf_bytes.copy_and_sum(source[start:end], out[start:end], chunk)
        if out.nbytes > leaf_bytes.BLOCK:
            self._blocks[number][start // leaf_bytes.BLOCK] = crc
        else:
            self._sums[number] = crc

    def _copy_small(self, batch: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy small tensors by their addresses: a view of each would cost more than its bytes."""
        view, base, sums, copy = self._view, self._base, self._sums, ctypes.memmove
        for number, address, offset, nbytes in batch:
            copy(base + offset, address, nbytes)
            sums[number] = crc64(view[offset : offset + nbytes])


def lies_in_a_row(leaf: Any) -> bool:
    """Tell whether threads can copy a leaf (a plain one) as it lies in memory."""
    if isinstance(leaf, np.ndarray):
        return bool(leaf.flags.c_contiguous)
    return (
        leaf.is_cpu
        and leaf.is_contiguous()
        and not leaf.is_neg()
        and not (leaf.is_complex() and leaf.is_conj())
    )
