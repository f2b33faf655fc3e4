"""What the processes beside the ranks share: one per folder, reports as lines, an end when told."""

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from checkpointing.durable import write_all

_POLL_S: Final = 0.03
_LOCK_S: Final = 15.0


def lock_for_one(path: Path, stop: threading.Event) -> int | None:
    """Take a folder for this process alone; a predecessor that drains has a while to leave."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_S
    while not stop.is_set():
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                break
            stop.wait(_POLL_S)
        else:
            return descriptor
    os.close(descriptor)
    return None


_emit_lock: Final = threading.Lock()


def emit(event: Mapping[str, Any]) -> bool:
    """Report one event on standard output; False when nobody is there to hear it."""
    line = json.dumps(event).encode() + b"\n"
    with _emit_lock:
        try:
            write_all(1, line)
        except OSError:
            return False
    return True


def fail(who: str, code: int, message: str) -> int:
    """Say on standard error why this process ends, and return its exit code."""
    sys.stderr.write(f"{who}: {message}\n")
    return code


def until_eof(stop: threading.Event) -> None:
    """Wait for the end of standard input, which is the word to leave."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    stop.set()


def positive(text: str) -> float:
    """Read an argument that is a number above 0; raises ValueError for any other."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number
