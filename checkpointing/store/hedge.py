"""When a part is late enough to be sent a second time: a pure policy."""

from bisect import insort
from math import ceil
from typing import Final

_ENOUGH: Final = 5
_QUANTILE: Final = 0.95
_TIMES: Final = 2.0
_SHORTEST_S: Final = 0.5  # below that a second sending costs more than it can win


class Hedger:
    """Knows how long the parts of one upload took."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def finished(self, seconds: float) -> None:
        """A part took so long."""
        insort(self._seconds, seconds)

    @property
    def late_after_s(self) -> float | None:
        """Twice the 95th percentile of the finished parts; None while too few are."""
        count = len(self._seconds)
        if count < _ENOUGH:
            return None
        return max(_TIMES * self._seconds[ceil(_QUANTILE * count) - 1], _SHORTEST_S)
