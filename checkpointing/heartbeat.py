"""What a rank tells its agent at every step boundary, and what it is asked there."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from checkpointing.environment import RankEnvironment
from checkpointing.guard import TermGuard
from checkpointing.slot import Control, Phase, RankSlot, SlotReading

SLOW_PHASE: Final = 10.0
"""What is not a step may take this many step timeouts."""

_SMOOTHING: Final = 0.2


class Heartbeat:
    """The rank's side of its slot file."""

    def __init__(self, environment: RankEnvironment) -> None:
        self._timeout_s = environment.step_timeout_s
        self._slot = RankSlot(environment.slot)
        self._guard: TermGuard | None = None
        self._is_first = True
        self._mark = time.monotonic()
        self.reading = SlotReading(pid=os.getpid())
        self.control: Control | None = None
        self.interval = 0
        self.beat(Phase.INIT, SLOW_PHASE)

    def guard(self) -> None:
        """Let SIGTERM end this process only when the agent has announced it."""
        slot = self._slot
        self._guard = TermGuard.install(lambda: bool((now := slot.control()) and now.terminate))
        self.note(guarded=self._guard is not None)
        self._slot.publish(self.reading)

    def note(self, **changes: Any) -> None:
        """Change fields of the next heartbeat."""
        self.reading = replace(self.reading, **changes)

    def beat(self, phase: Phase, timeouts: float = 1.0, extra_s: float = 0.0) -> None:
        """Say what goes on from now on.

        Args:
            phase: What.
            timeouts: For how many step timeouts it may.
            extra_s: And how many seconds more.
        """
        self._publish(phase, timeouts * self._timeout_s + extra_s)

    def tick(self, step: int, loss: float, tokens: int) -> None:
        """Tell of a finished step, and look at what the agent asks."""
        took, old = time.monotonic() - self._mark, self.reading.step_s
        if self._is_first:
            smooth = old  # the first step compiles and warms up
        else:
            smooth = took if math.isnan(old) else old + _SMOOTHING * (took - old)
        self._is_first = False
        self.note(step=step, loss=loss, step_s=smooth, tokens=tokens)
        self.beat(Phase.STEP)
        self.control = self._slot.control() or self.control
        if self.control is not None and step >= self.control.effective_step:
            self.interval = self.control.interval_steps

    def go(self) -> None:
        """Begin to measure the next step here."""
        self._mark = time.monotonic()

    @contextmanager
    def phase(self, phase: Phase, allowed_s: float) -> Iterator[None]:
        """Something else than a step; its time counts for none."""
        started = time.monotonic()
        self._publish(phase, allowed_s)
        try:
            yield
        finally:
            self._mark += time.monotonic() - started
            self.beat(Phase.STEP)

    def _publish(self, phase: Phase, allowed_s: float) -> None:
        self.note(
            phase=phase,
            phase_since=time.monotonic(),
            allowed_s=allowed_s,
            beats=self.reading.beats + 1,
            guarded=self._guard is not None and self._guard.holds,
        )
        self._slot.publish(self.reading)
