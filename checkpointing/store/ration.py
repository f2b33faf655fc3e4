"""One limit on bytes per second for several processes of a node: its state is a file in memory."""

import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

FILE: Final = "uploads.budget"
"""Its name in a node's folder."""

_STATE: Final = struct.Struct("<d")
_BURST_S: Final = 0.25
_LONGEST_S: Final = 30.0  # what is further ahead was not written by this rule


class Ration:
    """A share in the node's limit, first come, first served.

    Args:
        path: The file that all of them share; made when it is not there.
        bytes_per_s: The limit.
        clock: Monotonic seconds, of the machine and not of the process.
    """

    def __init__(
        self, path: Path, bytes_per_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, count: int) -> float:
        """Take bytes, and return the seconds to wait before sending them."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            now = self._clock()
            raw = os.pread(self._descriptor, _STATE.size, 0)
            free_at = _STATE.unpack(raw)[0] if len(raw) == _STATE.size else 0.0
            if not free_at <= now + _LONGEST_S:
                free_at = now
            start = max(free_at, now - _BURST_S)
            os.pwrite(self._descriptor, _STATE.pack(start + count / self._bytes_per_s), 0)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return max(0.0, start - now)
