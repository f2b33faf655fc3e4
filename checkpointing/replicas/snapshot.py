"""An arena file, or a replica, opened to be read: what lies in it, and its bytes in order."""

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, Self

from checkpointing.errors import ArenaInvalid, ReplicaError
from checkpointing.replicas.replica import Name, Offer
from checkpointing.stage.arena import PAGE, SLOTS, Capacities, Header
from checkpointing.store.pace import Pacer

_HEAD: Final = PAGE * (1 + SLOTS)


class Source(Protocol):
    """Where the bytes of a snapshot come from: its meta, then its extents."""

    def read_into(self, out: memoryview) -> None:
        """Fill all of `out` with what comes next."""


class SnapshotFile:
    """An open arena file; a replica is one with a single slot.

    Args:
        path: The file.
        in_memory: It lies in no disk, whose errors would come as signals where it is mapped.

    Raises:
        ArenaInvalid: Not an arena, or shorter than it says.
        FileNotFoundError: No such file.
    """

    def __init__(self, path: Path, *, in_memory: bool = False) -> None:
        self.in_memory = in_memory
        self.file = path.open("r+b", buffering=0)
        try:
            size = os.fstat(self.file.fileno()).st_size
            if size < _HEAD:
                raise ArenaInvalid(f"{path}: shorter than the head of an arena")
            self._map = mmap.mmap(self.file.fileno(), _HEAD)
        except BaseException:
            self.file.close()
            raise
        self._view = memoryview(self._map)
        self.headers: tuple[Header, ...] = ()
        try:
            self.capacities = Capacities.unpack(bytes(self._view[:PAGE]))
            if size < self.capacities.file_nbytes:
                raise ArenaInvalid(f"{path}: shorter than its header says")
            self.headers = tuple(
                Header(self._view[PAGE * (1 + index) : PAGE * (2 + index)])
                for index in range(self.capacities.slots)
            )
        except BaseException:
            self.close()
            raise

    def offer(self, index: int) -> Offer:
        """Describe a slot.

        Raises:
            ArenaInvalid: It is empty or half-written.
        """
        header = self.headers[index]
        staged = header.staged(index)
        if staged is None:
            raise ArenaInvalid("the slot is empty or half-written")
        meta_nbytes, meta_crc64 = header.meta()
        return Offer(
            name=Name(
                attempt=staged.attempt, step=staged.step, rank=staged.rank, world=staged.world
            ),
            staged_at=staged.staged_at,
            tiers=int(staged.tiers),
            nbytes=staged.nbytes,
            meta_nbytes=meta_nbytes,
            meta_crc64=meta_crc64,
            meta_room=self.capacities.meta,
            data_room=self.capacities.data,
        )

    def spans(self, index: int, offer: Offer) -> tuple[tuple[int, int], ...]:
        """Return (place in the file, length) of the meta and of the extents."""
        return (
            (self.capacities.meta_at(index), offer.meta_nbytes),
            (self.capacities.data_at(index), offer.nbytes),
        )

    def close(self) -> None:
        """Let go of the file."""
        for header in self.headers:
            header.release()
        self._view.release()
        with suppress(BufferError):
            self._map.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileSource:
    """The bytes of a slot, read from its file.

    Args:
        snapshot: The file.
        index: The slot.
        offer: What describes it.
        pace: Budget to keep to.
    """

    def __init__(self, snapshot: SnapshotFile, index: int, offer: Offer, pace: Pacer) -> None:
        self._fd = snapshot.file.fileno()
        self._spans = list(snapshot.spans(index, offer))
        self._pace = pace

    def read_into(self, out: memoryview) -> None:
        """Fill all of `out`, which lies within the meta or within the extents."""
        self._pace.nbytes(out.nbytes)
        while self._spans and not self._spans[0][1]:
            del self._spans[0]
        while out.nbytes:
            at, left = self._spans[0]
            count = os.preadv(self._fd, [out[:left]], at)
            if not count:
                raise ReplicaError("the file ends before its snapshot does")
            out = out[count:]
            self._spans[0] = (at + count, left - count)
