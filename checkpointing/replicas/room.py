"""How much may still be written to a folder, what is on its way there counted in."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from checkpointing.errors import ReplicaError
from checkpointing.replicas.spares import Spare
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
        self._when_short: Callable[[], None] | None = None

    def when_short(self, free: Callable[[], None]) -> None:
        """Call this, which gives back memory, before there is said to be too little of it."""
        self._when_short = free

    def share(self, nbytes: int) -> "Share":
        """Take some.

        Raises:
            ReplicaError: There is not enough, with the numbers.
        """
        with self._lock:
            limit, left = self._left()
            if left < nbytes and self._when_short is not None:
                self._when_short()
                limit, left = self._left()
            if left < nbytes:
                raise ReplicaError(f"{gib(nbytes)} are needed and {limit} has {gib(left)} left")
            self._taken += nbytes
        return Share(self, nbytes)

    def _left(self) -> tuple[str, int]:
        room = self._measure(self._folder)
        limit = min(room, key=lambda name: room[name])
        return limit, room[limit] - self._taken

    def give_back(self, nbytes: int) -> None:
        """What was taken is written by now and so measured, or does not come."""
        with self._lock:
            self._taken -= nbytes


class Share:
    """What one snapshot on its way has taken: less and less while it is written.

    Args:
        room: What it was taken from.
        nbytes: How much.
        spare: A file to write it over, instead of new memory; closed with this.
    """

    def __init__(self, room: Room, nbytes: int, spare: Spare | None = None) -> None:
        self.spare = spare
        self._room = room
        self._left = nbytes

    def written(self, nbytes: int) -> None:
        """So much of it is in the folder now."""
        nbytes = min(nbytes, self._left)
        self._left -= nbytes
        self._room.give_back(nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.written(self._left)
        if self.spare is not None:
            self.spare.close()
