"""How fast a node may send: a pure policy, time is passed in.

Additive increase, multiplicative decrease: the limit is open until the store asks for less or its
answers get slow, falls then to a fraction of what was being sent, and grows again by a constant per
second. A hard cap from the configuration is never exceeded, whatever the store takes.
"""

from collections import deque
from math import inf, isinf
from statistics import median
from typing import Final

_WINDOW_S: Final = 5.0
_GRAIN_S: Final = 0.25
_HOLD_S: Final = 1.0  # the many answers to one overload are one decrease
_GROWTH: Final = 0.1  # of the highest rate seen, per second
_OPEN_AT: Final = 2.0  # times the highest rate seen: a limit that far away limits nothing
_BURST_S: Final = 0.25
_FIRST_GUESS: Final = 8  # times the floor, when trouble comes before anything was measured


class Rate:
    """A limit on something per second.

    Args:
        cap: Hard limit; infinite for none.
        floor: The limit never falls below it, unless the cap is lower: an upload must end.
    """

    def __init__(self, *, cap: float = inf, floor: float = 1.0) -> None:
        if not cap > 0 or not floor > 0:
            raise ValueError("a rate is a positive number")
        self._cap = cap
        self._floor = min(floor, cap)
        self._peak = 0.0
        self._free_at = -inf
        self._cut_at = -inf
        self._grown_at = -inf
        self._taken: deque[tuple[float, float]] = deque()
        self.limit = cap

    @property
    def bound(self) -> bool:
        """Tell whether there is any limit at present."""
        return not isinf(self.limit)

    def take(self, amount: float, now: float) -> float:
        """Take, and return the seconds to wait before using it.

        Over any span of T seconds no more than `cap * (T + _BURST_S)` plus one amount is used.
        """
        self._grow(now)
        self._note(amount, now)
        if not self.bound:
            self._free_at = now
            return 0.0
        start = max(self._free_at, now - _BURST_S)
        self._free_at = start + amount / self.limit
        return max(0.0, start - now)

    def cut(self, factor: float, now: float, *, at_least: float = 0.0) -> bool:
        """Lower the limit to a fraction of what is being sent; False if that was just done.

        Args:
            factor: The fraction.
            now: Seconds.
            at_least: Fraction of the highest rate that counts as sent, also when it was less: when
                answers were late, little was sent because of that.
        """
        self._grow(now)
        if now - self._cut_at < _HOLD_S:
            return False
        self._cut_at = self._grown_at = now
        sent = max(self.measured(now), at_least * self._peak) or _FIRST_GUESS * self._floor
        self.limit = max(self._floor, factor * min(self.limit, sent))
        return True

    def measured(self, now: float) -> float:
        """Return what was taken per second lately."""
        self._forget(now)
        if not self._taken:
            return 0.0
        span = max(now - self._taken[0][0], 2 * _GRAIN_S)
        return sum(amount for _, amount in self._taken) / span

    def _grow(self, now: float) -> None:
        if self.limit >= self._cap:
            return
        self._peak = max(self._peak, self.measured(now))
        gained = max(_GROWTH * self._peak, self._floor / 2) * max(0.0, now - self._grown_at)
        self._grown_at = max(self._grown_at, now)
        self.limit = min(self._cap, self.limit + gained)
        if self.limit >= _OPEN_AT * max(self._peak, self._floor):
            self.limit = self._cap

    def _note(self, amount: float, now: float) -> None:
        if self._taken and now - self._taken[-1][0] < _GRAIN_S:
            at, before = self._taken[-1]
            self._taken[-1] = (at, before + amount)
        else:
            self._forget(now)
            self._taken.append((now, amount))
        self._peak = max(self._peak, self.measured(now))

    def _forget(self, now: float) -> None:
        while self._taken and now - self._taken[0][0] > _WINDOW_S:
            self._taken.popleft()


_SAMPLES: Final = 64
_ENOUGH: Final = 16
_SLOW: Final = 4.0
_WEIGHT: Final = 0.3


class Slowness:
    """Notices that the same amount of work takes several times longer than it used to.

    What is compared is seconds per byte, divided by the number of requests that shared the line.
    A line that stays slow becomes the new normal.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._recent = 0.0

    def add(self, seconds: float, nbytes: int, in_flight: int) -> bool:
        """Take an answered request; True when they have become slow."""
        if nbytes <= 0 or seconds <= 0:
            return False
        sample = seconds / nbytes / max(1, in_flight)
        usual = median(self._samples) if len(self._samples) >= _ENOUGH else inf
        self._samples.append(sample)
        self._recent += _WEIGHT * (sample - self._recent) if self._recent else sample
        return self._recent > _SLOW * usual


_THROTTLED: Final = 0.5
_LATE: Final = 0.7
_STALLED: Final = 0.5
_FLOOR_BYTES: Final = float(4 << 20)
_FLOOR_REQUESTS: Final = 2.0


class Budget:
    """Bytes and requests that a node may send, for all its uploads together.

    Args:
        max_bytes_per_s: Hard cap, None for none.
        max_requests_per_s: Hard cap, None for none.
    """

    def __init__(
        self, *, max_bytes_per_s: float | None = None, max_requests_per_s: float | None = None
    ) -> None:
        self.nbytes = Rate(cap=_cap(max_bytes_per_s), floor=_FLOOR_BYTES)
        self.requests = Rate(cap=_cap(max_requests_per_s), floor=_FLOOR_REQUESTS)
        self._slowness = Slowness()

    @property
    def bound(self) -> bool:
        """Tell whether there is any limit on bytes at present."""
        return self.nbytes.bound

    def throttled(self, now: float) -> None:
        """The store asked for less: 503, SlowDown, 429."""
        self.nbytes.cut(_THROTTLED, now)
        self.requests.cut(_THROTTLED, now)

    def late(self, now: float) -> None:
        """The store did not answer in time."""
        self.nbytes.cut(_LATE, now, at_least=_STALLED)

    def answered(self, seconds: float, nbytes: int, in_flight: int, now: float) -> None:
        """A request that was not held back by this budget took so long."""
        if self._slowness.add(seconds, nbytes, in_flight):
            self.nbytes.cut(_LATE, now, at_least=_STALLED)


def _cap(given: float | None) -> float:
    return inf if given is None else given
