"""Which attempt of a run wrote a folder: parts of two attempts never make one checkpoint.

Whoever starts attempts appends a line to a file at each start; a folder belongs to the last attempt
that had begun on its node when the folder was changed last.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkpointing.durable import write_all

_MOST_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt, its nodes, and when it was begun on this node, in Unix nanoseconds."""

    number: int
    nodes: int
    began_ns: int


def note(path: Path, number: int, nodes: int) -> None:
    """Append that an attempt begins now; called before any of its ranks runs; raises OSError."""
    line = json.dumps({"attempt": number, "nodes": nodes, "began_ns": time.time_ns()})
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, f"\n{line}\n".encode())  # what is before it may be a torn line
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> tuple[Attempt, ...]:
    """Return what was noted; a torn line is none.

    Raises:
        OSError: The file cannot be read; that it is not there yet is no error.
    """
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except FileNotFoundError:
        return ()
    found = (_parsed(line) for line in lines)
    return tuple(attempt for attempt in found if attempt is not None)


def of(attempts: tuple[Attempt, ...], changed_ns: int) -> Attempt | None:
    """Return the attempt that something changed then belongs to; None when nobody knows."""
    begun = [attempt for attempt in attempts if attempt.began_ns <= changed_ns]
    return begun[-1] if begun else None


def _parsed(line: bytes) -> Attempt | None:
    try:
        raw = json.loads(line)
        values = [raw[name] for name in ("attempt", "nodes", "began_ns")]
    except (ValueError, KeyError, TypeError):
        return None
    if any(type(value) is not int for value in values) or not 0 <= values[0] < 10**6:
        return None
    return Attempt(number=values[0], nodes=max(1, values[1]), began_ns=values[2])
