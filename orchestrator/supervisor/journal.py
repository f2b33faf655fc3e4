"""The journal: an append-only file of JSON lines, one CRC per line, one fsync per batch.

A line is the record's JSON object, sealed (`orchestrator.sealed_line`). Readers and the writer
agree on three rules:

- A torn last line (a crash inside `write`) is dropped, and cut off when a writer opens the file.
- A damaged line before the last is never repaired: JournalCorrupt names it.
- The newer epoch wins. A line of an older one behind it comes from a deposed writer and does not
  count; nor does one before it whose number the newer epoch used again, since it was written after
  the new writer had read the journal. What counts is numbered without gaps.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from checkpointing.durable import fsync_folder, write_all
from orchestrator.core.codec import CodecError, decode_record, encode
from orchestrator.core.fold import fold
from orchestrator.core.record import Record
from orchestrator.core.state import State
from orchestrator.errors import JournalCorrupt, NotFound
from orchestrator.sealed_line import MARK, seal, unseal


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
        whole = _whole_bytes(path) if path.exists() else 0
        # Appending, so that a writer who does not know yet that it is deposed overwrites nothing.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        os.ftruncate(self._fd, whole)
        os.fsync(self._fd)
        self._torn_at: int | None = None
        fsync_folder(path.parent)

    def append(self, records: Sequence[Record]) -> None:
        """Write one batch and wait for the disk.

        Raises:
            OSError: The disk is full or gone; a half-written batch is cut off again.
        """
        body = b"".join(render(record) for record in records)
        self._cut()
        self._torn_at = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, body)
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):  # tried again before the next batch
                self._cut()
            raise
        self._torn_at = None

    def _cut(self) -> None:
        """Take off what a failed batch left behind."""
        if self._torn_at is not None:
            os.ftruncate(self._fd, self._torn_at)
            os.fsync(self._fd)
            self._torn_at = None

    def close(self) -> None:
        """Close the file; every batch is on disk already."""
        os.close(self._fd)


def render(record: Record) -> bytes:
    """Return the record as one line with its CRC."""
    return seal(encode(record))


def parse(line: bytes) -> Record:
    """Return the record of one line.

    Raises:
        ValueError: The line is damaged.
        CodecError: The line is whole, but no record of this version.
    """
    return decode_record(unseal(line))


def read_records(path: Path) -> tuple[Record, ...]:
    """Read a whole journal, also while it is being written.

    Raises:
        NotFound: There is no such file.
        JournalCorrupt: A line before the last is damaged or missing.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFound(f"no journal at {path}: is this a run directory?") from error
    kept: list[Record] = []
    for record, _ in _lines(raw, path):
        if kept and record.epoch < kept[-1].epoch:
            continue
        while kept and record.epoch > kept[-1].epoch and record.seq <= kept[-1].seq:
            kept.pop()
        if record.seq != len(kept) + 1:
            raise JournalCorrupt(
                f"{path}: record {record.seq} comes where {len(kept) + 1} is missing; "
                "restore the file from a copy"
            )
        kept.append(record)
    return tuple(kept)


def state_of(records: Sequence[Record]) -> State:
    """Fold records into the state that they amount to."""
    state = State()
    for record in records:
        state = fold(state, record)
    return state


def _lines(raw: bytes, path: Path) -> Iterator[tuple[Record, int]]:
    """Yield (record, offset behind it) of each line; a torn last one is left out."""
    offset = 0
    while offset < len(raw):
        end = raw.find(b"\n", offset) + 1
        line = raw[offset : end or len(raw)]
        try:
            if not end:
                raise ValueError("it is torn")
            record = parse(line)
        except ValueError as error:
            # A good CRC around something unknown was written whole, by a later version. Two CRCs:
            # the newline between two lines is damaged, and the first of them was whole.
            is_torn = not isinstance(error, CodecError) and line.count(MARK) < 2
            if is_torn and offset + len(line) == len(raw):
                return
            number = raw.count(b"\n", 0, offset) + 1
            raise JournalCorrupt(
                f"{path}, line {number}: {error}; restore the file from a copy"
            ) from error
        offset = end
        yield record, offset


def _whole_bytes(path: Path) -> int:
    return max((end for _, end in _lines(path.read_bytes(), path)), default=0)
