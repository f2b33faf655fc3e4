"""A file that tensors are read straight into: of any size, and no memory that cannot be given back.

Room on the disk is taken first, so that a full one is an error here and not a signal later.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from checkpointing.leaves import Bytes


class Spool:
    """A mapped file; see `spool`."""

    def __init__(self, mapped: mmap.mmap, *, keep: bool) -> None:
        self._mapped = mapped
        self._keep = keep
        self._bytes: Bytes | None = np.frombuffer(mapped, dtype=np.uint8)

    def room(self, offset: int, nbytes: int) -> Bytes:
        """Return bytes of the file in place."""
        assert self._bytes is not None
        return self._bytes[offset : offset + nbytes]

    def settle(self, offset: int, nbytes: int) -> None:
        """Give back the memory that a range took; what is kept is written first."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = offset + nbytes - start
        if length > 0:
            if self._keep:
                self._mapped.flush(start, length)
            self._mapped.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Write what is kept; rooms must not be used any more."""
        self._bytes = None
        if self._keep:
            self._mapped.flush()
        with suppress(BufferError):  # a room is still referred to: the mapping goes with it
            self._mapped.close()


@contextmanager
def spool(path: Path, nbytes: int, *, keep: bool = True) -> Iterator[Spool]:
    """Create a file of a size and map it.

    Args:
        path: The file; must not exist.
        nbytes: Its size, at least 1.
        keep: Whether it is to last; else it has no name, and the system need not write it.

    Raises:
        FileExistsError: It exists.
        OSError: No room on the disk.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        if not keep:
            path.unlink()
        held = Spool(mmap.mmap(descriptor, nbytes), keep=keep)
        try:
            yield held
        finally:
            held.close()
        if keep:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
