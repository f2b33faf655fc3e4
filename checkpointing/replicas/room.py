"""How much may still be written to a folder, what is on its way there counted in."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from checkpointing.stage.memory import gib, room_for

Measure = Callable[[Path], dict[str, int]]
"""Returns the free bytes by what limits them."""


def on_disk(folder: Path) -> dict[str, int]:
    """Measure a file system that takes no memory."""
    stat = os.statvfs(folder)
    return {str(folder): stat.f_bavail * stat.f_frsize}


class Room:
    """What is left, shared by all threads of a process that write there.

    Args:
        folder: An existing one.
        measure: How its free bytes are found.
    """

    def __init__(self, folder: Path, measure: Measure = room_for) -> None:
        self._folder = folder
        self._measure = measure
        self._lock = threading.Lock()
        self._taken = 0

    def take(self, nbytes: int) -> str:
        """Take some until `give_back`; return "", or why there is not enough."""
        with self._lock:
            room = self._measure(self._folder)
            limit = min(room, key=lambda name: room[name])
            left = room[limit] - self._taken
            if left < nbytes:
                return f"{gib(nbytes)} are needed and {limit} has {gib(left)} left"
            self._taken += nbytes
            return ""

    def give_back(self, nbytes: int) -> None:
        """What was taken is written by now and so measured, or does not come."""
        with self._lock:
            self._taken -= nbytes
