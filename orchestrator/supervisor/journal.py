"""The journal: an append-only file of JSON lines, one CRC per line, one fsync per batch.

A line is the record's JSON object with its own CRC-32 as the last member:
`{"is":"Record","seq":7,...,"crc":"1f2e3d4c"}`. Readers and the writer agree on three rules:

- A torn last line (a crash inside `write`) is dropped, and cut off when a writer opens the file.
- A damaged line before the last is never repaired: JournalCorrupt names it.
- A line of an older epoch after a newer one comes from a deposed writer and does not count.
"""

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.core.codec import CodecError, decode_record, encode
from orchestrator.core.events import Record
from orchestrator.core.fold import fold
from orchestrator.core.state import State
from orchestrator.errors import JournalCorrupt, NotFound

MARK = b',"crc":"'
TAIL = b'"}'


class Journal(Protocol):
    """Where records are kept. The only other verb, reading, is `read_records`."""

    def append(self, records: Sequence[Record]) -> None:
        """Make the records durable, in order; returns after they are on disk."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class FileJournal:
    """The journal of one run, open for writing by the holder of the lease."""

    def __init__(self, path: Path) -> None:
        good = _good_bytes(path) if path.exists() else 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o640)
        os.ftruncate(self._fd, good)
        os.lseek(self._fd, good, os.SEEK_SET)
        os.fsync(self._fd)
        _fsync_folder(path.parent)

    def append(self, records: Sequence[Record]) -> None:
        """Write one batch and wait for the disk.

        Raises:
            OSError: The disk is full or gone; a half-written batch is cut off again.
        """
        body = b"".join(render(record) for record in records)
        start = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            _write_all(self._fd, body)
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, start)
            os.lseek(self._fd, start, os.SEEK_SET)
            raise

    def close(self) -> None:
        """Close the file; every batch is on disk already."""
        os.close(self._fd)


def render(record: Record) -> bytes:
    """Return the record as one line with its CRC."""
    text = json.dumps(encode(record), separators=(",", ":"), allow_nan=False)
    body = text.encode()[:-1]
    return body + MARK + b"%08x" % zlib.crc32(body) + TAIL + b"\n"


def parse(line: bytes) -> Record:
    """Return the record of one line.

    Raises:
        ValueError: The line is damaged or no record; the message says which.
    """
    body, mark, rest = line.rstrip(b"\n").rpartition(MARK)
    if not mark or not rest.endswith(TAIL) or len(rest) != 8 + len(TAIL):
        raise ValueError("no CRC at its end")
    if b"%08x" % zlib.crc32(body) != rest[:8]:
        raise ValueError("its CRC does not match")
    return decode_record(json.loads(body + b"}"))


def read_records(path: Path) -> tuple[Record, ...]:
    """Read a whole journal, also while it is being written.

    Raises:
        NotFound: There is no such file.
        JournalCorrupt: A line before the last is damaged.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFound(f"no journal at {path}: is this a run directory?") from error
    return tuple(record for record, _ in _lines(raw, path))


def state_of(records: Sequence[Record]) -> State:
    """Fold records into the state that they amount to."""
    state = State()
    for record in records:
        state = fold(state, record)
    return state


def _lines(raw: bytes, path: Path) -> Iterator[tuple[Record, int]]:
    """Yield (record, offset behind it) of the lines that count."""
    lines = raw.splitlines(keepends=True)
    offset, newest_epoch = 0, 0
    for number, line in enumerate(lines, start=1):
        offset += len(line)
        try:
            if not line.endswith(b"\n"):
                raise ValueError("it is torn")
            record = parse(line)
        except (ValueError, CodecError) as error:
            if number == len(lines):
                return
            raise JournalCorrupt(
                f"{path}, line {number}: {error}; restore the file from a copy"
            ) from error
        if record.epoch >= newest_epoch:
            newest_epoch = record.epoch
            yield record, offset


def _good_bytes(path: Path) -> int:
    return max((end for _, end in _lines(path.read_bytes(), path)), default=0)


def _write_all(fd: int, body: bytes) -> None:
    view = memoryview(body)
    while view:
        view = view[os.write(fd, view) :]


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
