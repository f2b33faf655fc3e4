"""For how long snapshots have been staged, on a clock that nobody sets."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from checkpointing.stage.arena import StagedSlot

_Name = tuple[int, int, float]


class Ages:
    """Remembers when each snapshot was first seen.

    The stamp in an arena is of the wall clock, so its age is not known on this one: what was there
    at the first look has none.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Path, dict[_Name, float | None]] = {}
        self._is_first = True

    def look(self, found: Mapping[Path, Sequence[StagedSlot]]) -> None:
        """Take what all arenas hold now; what is not among it is forgotten."""
        now = None if self._is_first else self._clock()
        self._is_first = False
        self._seen = {
            path: {_name(slot): self._seen.get(path, {}).get(_name(slot), now) for slot in slots}
            for path, slots in found.items()
        }

    def of(self, path: Path, slot: StagedSlot) -> float | None:
        """Return the seconds since a snapshot was first seen, None when that is not known."""
        since = self._seen.get(path, {}).get(_name(slot))
        return None if since is None else self._clock() - since


def _name(slot: StagedSlot) -> _Name:
    """Name a snapshot so that it keeps its name in an arena that takes the place of its own."""
    return slot.step, slot.attempt, slot.staged_at
