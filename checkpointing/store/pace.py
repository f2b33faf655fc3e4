"""The budget of a process, shared by its threads: waits for the time that the policy asks for."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from checkpointing.store.budget import Budget
from checkpointing.store.ration import Ration

_LARGEST_SIP: Final = 1 << 20
_SMALLEST_SIP: Final = 64 << 10
_SIP_S: Final = 0.05
_SMALLEST_SAMPLE: Final = 1 << 20  # of smaller ones the time tells nothing about the line


@dataclass(slots=True)
class Sample:
    """One transfer; its time tells nothing about the line when the budget held it back."""

    held_back: bool = False


class Pacer:
    """Makes threads keep to one budget.

    Args:
        budget: The policy.
        clock: Monotonic seconds.
        sleep: Waits; so that tests need not.
        ration: What other processes of the node send under as well.
    """

    def __init__(
        self,
        budget: Budget | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        ration: Ration | None = None,
    ) -> None:
        self._ration = ration
        self._budget = budget or Budget()
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._in_flight = 0

    @property
    def bound(self) -> bool:
        """Tell whether bytes are limited at present."""
        return self._budget.bound

    def request(self) -> float:
        """Wait until one more request may be made; return the seconds waited."""
        with self._lock:
            wait = self._budget.requests.take(1, self._clock())
        return self._wait(wait)

    def nbytes(self, count: int) -> float:
        """Wait until so many bytes may be sent; return the seconds waited."""
        with self._lock:
            wait = self._budget.nbytes.take(count, self._clock())
            if self._ration is not None:
                wait = max(wait, self._ration.take(count))
        return self._wait(wait)

    def sip(self) -> int:
        """Return how many bytes to take at once, so that a limited line still flows evenly."""
        limit = self._budget.nbytes.limit
        return int(max(_SMALLEST_SIP, min(_LARGEST_SIP, limit * _SIP_S)))

    @contextmanager
    def transfer(self, nbytes: int) -> Iterator["Sample"]:
        """Watch one transfer; how long it took counts when it ends well and was not held back."""
        sample = Sample()
        with self._lock:
            self._in_flight += 1
            in_flight = self._in_flight
        begun = self._clock()
        try:
            yield sample
            if not sample.held_back and nbytes >= _SMALLEST_SAMPLE:
                with self._lock:
                    now = self._clock()
                    self._budget.answered(now - begun, nbytes, in_flight, now)
        finally:
            with self._lock:
                self._in_flight -= 1

    def throttled(self) -> None:
        """The store asked for less."""
        with self._lock:
            self._budget.throttled(self._clock())

    def late(self) -> None:
        """The store did not answer in time."""
        with self._lock:
            self._budget.late(self._clock())

    def _wait(self, seconds: float) -> float:
        if seconds > 0:
            self._sleep(seconds)
        return seconds
