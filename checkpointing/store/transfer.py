"""What an upload did: bytes, seconds, and what went wrong on the way."""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """An upload that is over.

    Attributes:
        nbytes: Size of the object; 0 when it was there already.
        seconds: How long it took, on a clock that nobody sets.
        retries: How often a request was made again, by the store's code for the reason.
        hedges: Parts that were sent a second time because they were late.
        plane: Who sent the bytes: "boto3", "awscrt" or "directory".
    """

    nbytes: int
    seconds: float
    retries: Mapping[str, int] = field(default_factory=dict)
    hedges: int = 0
    plane: str = "directory"

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class Tally:
    """Counts while an upload runs, in many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._retries: Counter[str] = Counter()
        self._hedges = 0
        self._begun = time.monotonic()

    def retried(self, code: str) -> None:
        """A request failed for this reason and is made again."""
        with self._lock:
            self._retries[code or "unknown"] += 1

    def hedged(self) -> None:
        """A late part is sent a second time."""
        with self._lock:
            self._hedges += 1

    def done(self, nbytes: int, plane: str) -> Transfer:
        """Return the sums."""
        with self._lock:
            return Transfer(
                nbytes=nbytes,
                seconds=time.monotonic() - self._begun,
                retries=dict(self._retries),
                hedges=self._hedges,
                plane=plane,
            )
