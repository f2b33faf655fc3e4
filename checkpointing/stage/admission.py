"""Whether the memory of a node suffices for the arenas of all its ranks."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from checkpointing.errors import StageRefused
from checkpointing.stage.arena import PAGE, Capacities
from checkpointing.stage.memory import gib, room_for

_LOCK_S: Final = 600.0  # the other ranks of the node take their memory meanwhile
_POLL_S: Final = 0.02


class Admission:
    """Measures for one rank and those that still have to take their memory.

    Args:
        path: The rank's arena; those of the others lie beside it.
        local_world: Number of ranks on this node.
    """

    def __init__(self, path: Path, local_world: int) -> None:
        self._path = path
        self._local_world = local_world

    def left(self) -> tuple[str, int]:
        """Return what limits the memory most, and how many bytes it leaves."""
        room = room_for(self._path.parent)
        limit = min(room, key=lambda name: room[name])
        return limit, room[limit]

    def share(self, capacities: Capacities) -> int:
        """Return what this rank and those of the node that have no arena yet need together."""
        least = Capacities(meta=PAGE, data=capacities.data, slots=1).file_nbytes
        others = [p for p in self._path.parent.glob("arena-*") if p.name != self._path.name]
        have = sum(_size(path) >= least for path in others)
        return capacities.file_nbytes * (1 + max(0, self._local_world - 1 - have))

    def needs(self, capacities: Capacities) -> str:
        """Say for a person what these capacities take."""
        ranks = self.share(capacities) // capacities.file_nbytes
        whose = "this rank's state" if ranks == 1 else f"the states of {ranks} ranks of this node"
        return (
            f"staging needs {gib(self.share(capacities))} in {self._path.parent} for two copies "
            f"of {whose}"
        )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let the ranks of a node measure and take memory one after the other."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    deadline = time.monotonic() + _LOCK_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise StageRefused(
                        f"another rank of this node has been taking memory in {folder} for "
                        f"{_LOCK_S:.0f} s"
                    ) from error
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
