"""Files of dropped replicas, kept for the next ones: to take new memory costs more than to copy."""

import fcntl
import mmap
import os
import threading
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

_POPULATE: Final = getattr(mmap, "MAP_POPULATE", 0)  # Linux only
_BLOCK: Final = 512  # of st_blocks, whatever the file system
_FULL: Final = 7 / 8
_IDLE_S: Final = 60.0  # copies that are rarer than that need not be fast


class Spare:
    """A file in memory, mapped with all of its pages, that no replica is in any more.

    Args:
        path: Where it lies; who renames it keeps it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.since = time.monotonic()
        with FileIO(path, "r+") as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), self.nbytes, flags=mmap.MAP_SHARED | _POPULATE)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmap it, and remove it unless it was renamed."""
        self.view.release()
        with suppress(BufferError):
            self._map.close()
        self.path.unlink(missing_ok=True)


class Spares:
    """At most so many files as there are ranks: what a shelf takes while it takes them all in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Spare] = []

    def add(self, path: Path, most: int) -> None:
        """Keep a file that nobody reads, or remove it when there are as many as `most`."""
        with self._lock:
            is_wanted = len(self._idle) < most
        try:
            if is_wanted:
                spare = Spare(path)
                with self._lock:
                    self._idle.append(spare)
                return
        except (OSError, ValueError):  # no address space, or an empty file
            pass
        path.unlink(missing_ok=True)

    def take(self, nbytes: int) -> Spare | None:
        """Return one of exactly this size, which is the caller's from now on."""
        with self._lock:
            for number, spare in enumerate(self._idle):
                if spare.nbytes == nbytes:
                    return self._idle.pop(number)
        return None

    def drop(self, idle_s: float = 0.0) -> None:
        """Give memory back: of all, or of those that nobody has needed for so long."""
        until = time.monotonic() - idle_s
        with self._lock:
            gone = [spare for spare in self._idle if spare.since <= until]
            self._idle = [spare for spare in self._idle if spare.since > until]
        for spare in gone:
            spare.close()

    def drop_idle(self) -> None:
        """Give back what nobody has needed for a while."""
        if self._idle:
            self.drop(_IDLE_S)


def set_aside(path: Path, aside: Path) -> bool:
    """Move a file out of its place to be written over; False when it had better go.

    That is when somebody reads it, who holds a shared lock on it, or when much of it is empty and
    takes no memory so far. The caller lets nobody open it meanwhile.
    """
    with suppress(OSError), FileIO(path, "r+") as file:
        stat = os.fstat(file.fileno())
        if stat.st_blocks * _BLOCK >= stat.st_size * _FULL:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.replace(aside)
            return True
    return False
