"""The ledger of nodes: one append-only file that all runs of a directory share.

Several supervisors on several machines append to it. Each entry is one line with a CRC, written
at once at the end of the file, under a lock where the file system has one. Nothing that was
written is ever changed. A line that is torn or damaged, or comes from a later version, is skipped
and counted: the harm that one run suffers must not stop another.

A line has about 250 bytes: a hundred incidents a day make 9 MB in a year, which is read once in
about a second. After that only what was added is read, so nothing is ever compacted.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random

from checkpointing.durable import fsync_folder, write_all
from orchestrator.core.codec import decode, encode
from orchestrator.core.ledger import Entry, NodeIncident
from orchestrator.errors import LedgerUnavailable
from orchestrator.sealed_line import seal, unseal

if TYPE_CHECKING:
    from orchestrator.config import RunConfig

FILE_NAME = "node-ledger.jsonl"
LOCK_TIMEOUT_S = 5.0
TEXT_MAX = 400
# What flock says on file systems without locks; one short append is all that is left there.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def ledger_of(config: "RunConfig") -> "Ledger":
    """Return the ledger that a run reads and writes.

    Local nodes are called alike in every run and are none that runs could share: each such run
    has a ledger of its own.
    """
    is_shared = config.nodes.launcher == "slurm"
    return Ledger((config.run.dir if is_shared else config.run_dir) / FILE_NAME)


class Ledger:
    """The ledger at a path; threads may share it.

    Every verb may block on a slow file system, and `note` up to `LOCK_TIMEOUT_S` for the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.Lock()
        self._entries: tuple[Entry, ...] = ()
        self._skipped = 0
        self._offset = 0
        self._seen: tuple[int, ...] | None = None

    def note(self, entry: Entry) -> None:
        """Write an entry and wait for the disk; an incident that is there already changes nothing.

        Raises:
            LedgerUnavailable: It may or may not have been written; noting it again is safe.
        """
        entry = _bounded(entry)
        with self._exclusively("written"), _opened(self.path) as fd, _locked(fd):
            self._end_torn_line(fd)
            self._read(fd)
            if not (isinstance(entry, NodeIncident) and self._has(entry)):
                write_all(fd, seal(encode(entry)))
            os.fsync(fd)

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries as they were written; the same object while the file is the same.

        Raises:
            LedgerUnavailable: The file is there and cannot be read. No file is an empty ledger.
        """
        with self._exclusively("read"):
            try:
                # Not stat: only opening a file makes a network file system ask its server.
                fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                self._forget()
                return ()
            try:
                self._read(fd)
            finally:
                os.close(fd)
            return self._entries

    @property
    def skipped(self) -> int:
        """How many lines of the file last read could not be understood."""
        return self._skipped

    def _has(self, entry: NodeIncident) -> bool:
        return any(isinstance(e, NodeIncident) and _key(e) == _key(entry) for e in self._entries)

    def _read(self, fd: int) -> None:
        """Take in what was added; all of it when the file is another one or was cut."""
        stat = os.fstat(fd)
        seen = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if seen == self._seen:
            return
        if self._seen is None or seen[:2] != self._seen[:2] or stat.st_size < self._offset:
            self._forget()
        raw = _read_from(fd, self._offset)
        # What has no newline yet is still being written, or torn: the next writer ends it.
        whole = raw.rfind(b"\n") + 1
        found = [_parse(line) for line in raw[:whole].split(b"\n")[:-1]]
        self._entries += tuple(entry for entry in found if entry is not None)
        self._skipped += found.count(None)
        self._offset += whole
        self._seen = seen

    def _forget(self) -> None:
        self._entries, self._skipped, self._offset, self._seen = (), 0, 0, None

    def _end_torn_line(self, fd: int) -> None:
        """Keep what a killed writer left from swallowing the next entry."""
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            write_all(fd, b"\n")

    @contextmanager
    def _exclusively(self, done: str) -> Iterator[None]:
        try:
            with self._turn:
                yield
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise LedgerUnavailable(f"{self.path}: cannot be {done}: {why}") from error


def _bounded(entry: Entry) -> Entry:
    """Shorten its text, so that a line stays short enough to be appended in one piece."""
    if isinstance(entry, NodeIncident):
        return replace(entry, cause=entry.cause[:TEXT_MAX])
    return replace(entry, why=entry.why[:TEXT_MAX])


def _key(entry: NodeIncident) -> tuple[str, int, str, float]:
    return entry.run, entry.incident, entry.node, entry.at


def _parse(line: bytes) -> Entry | None:
    try:
        entry: Entry = decode(unseal(line), Entry)
    except (ValueError, RecursionError):  # damaged, or (CodecError) of a later version
        return None
    return entry


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    is_new = not path.exists()
    fd = os.open(path, flags, 0o660)
    try:
        if is_new:
            fsync_folder(path.parent)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _locked(fd: int) -> Iterator[None]:
    """Hold the file's lock; a holder that is frozen makes it BlockingIOError after a while."""
    tries = Retrying(
        retry=retry_if_exception_type(BlockingIOError),
        stop=stop_after_delay(LOCK_TIMEOUT_S),
        wait=wait_random(0.001, 0.01),
        reraise=True,
    )
    try:
        tries(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(error.errno, f"locked by another process for {LOCK_TIMEOUT_S:g} s") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    yield  # closing the file releases the lock


def _read_from(fd: int, offset: int) -> bytes:
    parts = []
    while part := os.pread(fd, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
