"""Which ranks have been in one phase for longer than the phase allows.

Pure: the caller reads the heartbeats and the clock. A rank without a heartbeat is unknown, not
hung: a script that never reports is watched by its exits and its log alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Protocol


class Beat(Protocol):
    """What a heartbeat has to tell; times are of one monotonic clock."""

    @property
    def step(self) -> int:
        """Last finished step, below zero when none."""

    @property
    def phase(self) -> str:
        """What the rank is doing."""

    @property
    def phase_since(self) -> float:
        """When this phase, or this step within it, began."""

    @property
    def allowed_s(self) -> float:
        """How long it may last; infinite or not a number means no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """A rank that is late.

    Attributes:
        rank: Global rank.
        phase: What it is doing.
        step: Last finished step, below zero when none.
        for_s: Seconds beyond what the phase allows.
    """

    rank: int
    phase: str
    step: int
    for_s: float


def overdue(readings: Mapping[int, Beat | None], now: float) -> tuple[Overdue, ...]:
    """Return the late ranks in order of rank.

    Args:
        readings: Heartbeat of each rank; None when it has not written one yet.
        now: The monotonic clock of the node where the heartbeats were written.
    """
    late = []
    for rank, beat in sorted(readings.items()):
        if beat is None or not isfinite(beat.allowed_s):
            continue
        for_s = now - beat.phase_since - beat.allowed_s
        if for_s > 0:
            late.append(Overdue(rank=rank, phase=str(beat.phase), step=beat.step, for_s=for_s))
    return tuple(late)
