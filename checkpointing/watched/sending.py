"""Takes the bytes of a finished entry to the store and makes sure that they are there.

All files are one row of bytes, cut into pieces; a few buffers of a piece are all the memory that it
takes. A piece is named by its sum, so that what is there already is not sent again.
"""

import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from checkpointing.checksum import crc64
from checkpointing.errors import CheckpointingError, ObjectCorrupt, StoreUnavailable
from checkpointing.store.base import ObjectStore
from checkpointing.watched import names
from checkpointing.watched.disk import Look, Seen
from checkpointing.watched.documents import PIECE, File, Part, Piece

_THREADS: Final = 3
_WAIT_S: Final = 600.0  # for a buffer: the deadlines of the store's own requests come first


class Changed(CheckpointingError):
    """A file changed while it was read; it is looked at again later."""


class Stopped(CheckpointingError):
    """The process was told to end."""


class Sending:
    """Sends one entry, once.

    Args:
        store: Where to.
        prefix: What it is kept under there.
        entry: Its name.
        node: Whose part it is.
        stopped: Tells whether to give up.
    """

    def __init__(
        self, store: ObjectStore, prefix: str, entry: str, node: str, stopped: Callable[[], bool]
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._entry = entry
        self._node = node
        self._stopped = stopped
        self._free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        self._pieces: list[Piece] = []
        self._running: list[Future[None]] = []

    def run(self, path: Path, seen: Look, attempt: int) -> Part:
        """Upload and verify everything; the part itself is not stored yet.

        Raises:
            Changed: Something is not as it was seen.
            Stopped: Told to end.
            StoreError: The store could not take it.
        """
        total = sum(file.nbytes for file in seen.files.values())
        for _ in range(_THREADS + 1):
            self._free.put(bytearray(min(PIECE, total)))
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="piece")
        try:
            files = tuple(self._read_all(path, seen, pool))
            for future in self._running:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
        return Part(
            entry=self._entry,
            node=self._node,
            attempt=attempt,
            single=seen.single,
            files=files,
            folders=seen.folders,
            links=seen.links,
            pieces=tuple(self._pieces),
        )

    def _read_all(self, path: Path, seen: Look, pool: ThreadPoolExecutor) -> Iterator[File]:
        buffer, filled = self._buffer(), 0
        for name, file in seen.files.items():
            crc = 0
            for want in _Reading(path if seen.single else path / name, file):
                while want.left:
                    with memoryview(buffer) as whole:
                        count = want.into(whole[filled:])
                        crc = crc64(whole[filled : filled + count], crc)
                    filled += count
                    if filled == len(buffer):
                        self._submit(pool, buffer, filled)
                        buffer, filled = self._buffer(), 0
            yield File(
                path=name,
                nbytes=file.nbytes,
                crc64=crc,
                mtime_ns=file.mtime_ns,
                mode=file.mode & 0o777,
            )
        if filled:
            self._submit(pool, buffer, filled)

    def _buffer(self) -> bytearray:
        running, self._running = self._running, []
        for future in running:
            if future.done():
                future.result()
            else:
                self._running.append(future)
        if self._stopped():
            raise Stopped(f"{self._entry}: told to end")
        try:
            return self._free.get(timeout=_WAIT_S)
        except queue.Empty:
            raise StoreUnavailable(f"{self._entry}: no piece was taken in {_WAIT_S:g} s") from None

    def _submit(self, pool: ThreadPoolExecutor, buffer: bytearray, nbytes: int) -> None:
        self._pieces.append(piece := Piece(nbytes=nbytes, crc64=crc64(memoryview(buffer)[:nbytes])))
        number = len(self._pieces) - 1
        self._running.append(pool.submit(self._send, number, piece, buffer))

    def _send(self, number: int, piece: Piece, buffer: bytearray) -> None:
        try:
            key = names.piece_key(
                self._prefix, self._entry, self._node, number, piece.nbytes, piece.crc64
            )
            with memoryview(buffer) as whole:
                self._store.upload(key, [whole[: piece.nbytes]], piece.crc64)
                verify(self._store, key, piece, buffer)
        finally:
            self._free.put(buffer)


def verify(store: ObjectStore, key: str, piece: Piece, scratch: bytearray) -> None:
    """Make sure that the store has these bytes; it is read when the store knows no sum.

    Raises:
        ObjectCorrupt: It has none or others.
    """
    info = store.head(key)
    if info is None or info.nbytes != piece.nbytes:
        raise ObjectCorrupt(f"{key}: {info.nbytes if info else 'no'} bytes, not {piece.nbytes}")
    found = info.crc64
    if found is None:
        with memoryview(scratch)[: piece.nbytes] as room:
            store.read_into(key, 0, room)
            found = crc64(room)
    if found != piece.crc64:
        raise ObjectCorrupt(f"{key}: CRC {found:016x}, not {piece.crc64:016x}")


class _Reading:
    """Reads one file that must be, and stay, as it was seen; iterated once."""

    def __init__(self, path: Path, seen: Seen) -> None:
        self._path = path
        self._seen = seen
        self._descriptor = -1
        self.left = seen.nbytes

    def __iter__(self) -> Iterator["_Reading"]:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise Changed(f"{self._path.name}: {error.strerror}") from error
        try:
            self._is_same()
            yield self
            self._is_same()
        finally:
            os.close(self._descriptor)

    def into(self, room: memoryview) -> int:
        """Fill some of the room."""
        count = os.readv(self._descriptor, [room[: self.left]])
        if not count:
            raise Changed(f"{self._path.name}: became shorter")
        self.left -= count
        return count

    def _is_same(self) -> None:
        if Seen.of(os.fstat(self._descriptor)) != self._seen:
            raise Changed(f"{self._path.name}: was written to")
