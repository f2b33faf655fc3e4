"""Takes a snapshot in: as its bytes come they are summed and written, its header last of all."""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from typing import Final, Self

from checkpointing.checksum import crc64
from checkpointing.errors import ArenaInvalid, ReplicaCorrupt
from checkpointing.extents import Extent
from checkpointing.replicas.replica import Offer
from checkpointing.replicas.room import Share
from checkpointing.replicas.snapshot import Source
from checkpointing.stage.arena import PAGE, Header
from checkpointing.stage.meta import Meta

_PIECE: Final = 1 << 20  # summed and written while it is in the cache
_BUFFERS: Final = 4


class Check:
    """Sums extents while their bytes pass by.

    Args:
        extents: With their places and sums.
        nbytes: Length of the area that they lie in.

    Raises:
        ReplicaCorrupt: They do not lie in it one after the other.
    """

    def __init__(self, extents: Sequence[Extent], nbytes: int) -> None:
        end = 0
        for extent in extents:
            is_whole = type(extent.offset) is type(extent.nbytes) is int
            if not is_whole or extent.nbytes < 0 or extent.offset < end:
                raise ReplicaCorrupt(f"{extent.name!r:.80}: its place overlaps another, or is none")
            end = extent.offset + extent.nbytes
        if end > nbytes:
            raise ReplicaCorrupt(f"extents of {end} bytes in {nbytes}")
        self._extents = extents
        self._next = self._at = self._crc = 0
        self._wrong: list[str] = []

    def feed(self, piece: memoryview) -> None:
        """Take the bytes that come next."""
        begin, end = self._at, self._at + piece.nbytes
        while self._next < len(self._extents):
            extent = self._extents[self._next]
            stop = extent.offset + extent.nbytes
            if extent.nbytes and extent.offset < end:
                first, last = max(extent.offset, begin), min(stop, end)
                self._crc = crc64(piece[first - begin : last - begin], self._crc)
            if stop > end:
                break
            if self._crc != extent.crc64:
                self._wrong.append(extent.name)
            self._next, self._crc = self._next + 1, 0
        self._at = end

    def finish(self) -> None:
        """Say at the end whether all was right.

        Raises:
            ReplicaCorrupt: It was not.
        """
        if self._next < len(self._extents):
            raise ReplicaCorrupt(f"{self._extents[self._next].name!r:.80}: is not all there")
        if self._wrong:
            more = f" and {len(self._wrong) - 1} more" if len(self._wrong) > 1 else ""
            raise ReplicaCorrupt(f"{self._wrong[0]!r:.80}{more}: bytes fail their CRC")


class _Writer:
    """Writes one piece after the other on a thread of its own, while the next ones come.

    Args:
        fd: The file.
        at: Where the first one goes.
        share: The room that was taken for them.
    """

    def __init__(self, fd: int, at: int, share: Share) -> None:
        self._fd = fd
        self._at = at
        self._share = share
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._free = deque(memoryview(bytearray(_PIECE)) for _ in range(_BUFFERS))
        self._writing: deque[tuple[memoryview, Future[None]]] = deque()

    def buffer(self, nbytes: int) -> memoryview:
        """Return memory for the next piece, which has to be written before another is asked for."""
        if not self._free:
            self._finish_one()
        return self._free[0][:nbytes]

    def write(self, piece: memoryview) -> None:
        """Have the piece written, sooner or later."""
        written = self._pool.submit(self._write, piece, self._at)
        self._writing.append((self._free.popleft(), written))
        self._at += piece.nbytes

    def _write(self, piece: memoryview, at: int) -> None:
        _write(self._fd, piece, at)
        self._share.written(piece.nbytes)

    def _finish_one(self) -> None:
        buffer, written = self._writing.popleft()
        written.result()
        self._free.append(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        while self._writing and kind is None:
            self._finish_one()


class _Mapping:
    """The same for memory that is mapped: the pieces come to where they stay, and nowhere else."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def buffer(self, nbytes: int) -> memoryview:
        """Return the place of the next piece."""
        return self._view[:nbytes]

    def write(self, piece: memoryview) -> None:
        """Go on behind it."""
        self._view = self._view[piece.nbytes :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._view = memoryview(b"")


def take(
    offer: Offer, source: Source, file: FileIO, share: Share, mapped: memoryview | None = None
) -> None:
    """Write a snapshot as slot 0 of an arena file with one slot.

    Args:
        offer: What describes it.
        source: Where its bytes come from.
        file: An empty one, or one that is written over.
        share: The room that was taken for it.
        mapped: All of the file, mapped, if it has its size already.

    Raises:
        ReplicaCorrupt: What came is not what was offered; all of it was read, unless its meta was
            already wrong.
        OSError: The source has broken off, or there is no room left.
    """
    capacities = offer.capacities
    fd = file.fileno()
    packed = bytearray(offer.meta_nbytes)
    source.read_into(memoryview(packed))
    check = Check(_extents(bytes(packed), offer), offer.nbytes)
    _write(fd, memoryview(packed), capacities.meta_at(0))
    at = capacities.data_at(0)
    with _Writer(fd, at, share) if mapped is None else _Mapping(mapped[at:]) as writer:
        for at in range(0, offer.nbytes, _PIECE):
            piece = writer.buffer(min(_PIECE, offer.nbytes - at))
            source.read_into(piece)
            check.feed(piece)
            writer.write(piece)
    check.feed(memoryview(b""))
    check.finish()
    os.ftruncate(fd, capacities.file_nbytes)
    _write(fd, memoryview(capacities.pack() + _header(offer)), 0)


def _extents(packed: bytes, offer: Offer) -> list[Extent]:
    if crc64(packed) != offer.meta_crc64:
        raise ReplicaCorrupt("the meta fails its CRC")
    try:
        found = Meta.unpack(packed).extents
        return sorted(found, key=lambda extent: (extent.offset, extent.nbytes))
    except ArenaInvalid as error:
        raise ReplicaCorrupt(f"the meta is none: {error}") from error


def _header(offer: Offer) -> bytes:
    """Return the header page of a slot with a snapshot that is whole."""
    page = bytearray(PAGE)
    header = Header(memoryview(page))
    header.record.write(
        offer.name.step,
        offer.name.attempt,
        offer.name.rank,
        offer.name.world,
        offer.staged_at,
        offer.nbytes,
        offer.meta_nbytes,
        offer.meta_crc64,
        offer.tiers,
    )
    header.release()
    return bytes(page)


def _write(fd: int, piece: memoryview, at: int) -> None:
    while piece.nbytes:
        count = os.pwrite(fd, piece, at)
        at, piece = at + count, piece[count:]
