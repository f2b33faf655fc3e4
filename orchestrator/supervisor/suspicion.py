"""How long a node may be silent before that is odd, judged by its own past; pure.

A node that is always punctual is odd after three missing heartbeats. One that was late by seconds
in the last minutes (a starved CPU, a bad link) gets more time than it ever took: with `h` the
heartbeat interval, `lateness` what a gap had beyond it, and `longest` the longest gap remembered,

    patience = max(3 h, 0.5 s, h + mean(lateness) + 4 rms(lateness), 1.5 longest)

and at most `agent_lost_s`. Each term grows with every single gap, so more jitter never makes it
shorter. Lateness is taken from the known interval and not from the mean: a deviation shrinks when
all gaps are equally long.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

FLOOR_BEATS = 3.0
FLOOR_S = 0.5
DEVIATIONS = 4.0
LONGEST_FACTOR = 1.5
KEPT_GAPS = 60
PEAK_S = 60.0
KEPT_PEAKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The run's numbers that bound every patience."""

    heartbeat_s: float
    agent_lost_s: float

    @property
    def floor_s(self) -> float:
        """The shortest patience."""
        return min(max(FLOOR_BEATS * self.heartbeat_s, FLOOR_S), self.agent_lost_s)


def patience_s(gaps: Iterable[float], longest_s: float, limits: Limits) -> float:
    """Return the silence that past gaps make plausible.

    Args:
        gaps: The latest gaps between signs of life.
        longest_s: The longest of a longer time, 0 for none.
        limits: The bounds of the result.
    """
    late = [max(0.0, gap - limits.heartbeat_s) for gap in gaps] or [0.0]
    mean = sum(late) / len(late)
    rms = math.sqrt(sum(each * each for each in late) / len(late))
    by_jitter = limits.heartbeat_s + mean + DEVIATIONS * rms
    plausible = max(limits.floor_s, by_jitter, LONGEST_FACTOR * longest_s)
    return min(plausible, limits.agent_lost_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """When a node was heard, and the gaps between; of bounded size.

    Attributes:
        last: When anything was heard of it.
        counted: The sign of life that the next gap is counted from. Several close together count
            as one: a burst of facts must not push the gaps between heartbeats out of the window.
        gaps: The latest gaps, newest last.
        peaks: The longest gap of each of the last minutes, as (number of the minute, gap).
    """

    last: float
    counted: float
    gaps: tuple[float, ...] = ()
    peaks: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def begun(now: float) -> "Rhythm":
        """Return the rhythm of a node that is heard for the first time."""
        return Rhythm(last=now, counted=now)

    def heard(self, now: float, limits: Limits) -> "Rhythm":
        """Return it with one more sign of life."""
        gap = now - self.counted
        if gap < limits.heartbeat_s / 2:
            return replace(self, last=now)
        minute = int(now // PEAK_S)
        gaps = (*self.gaps, gap)[-KEPT_GAPS:]
        peaks = tuple((m, peak) for m, peak in self.peaks if minute - KEPT_PEAKS < m < minute)
        this = max((peak for m, peak in self.peaks if m == minute), default=0.0)
        peaks = (*peaks, (minute, max(this, gap)))
        return Rhythm(last=now, counted=now, gaps=gaps, peaks=peaks)

    def moved(self, by_s: float, now: float) -> "Rhythm":
        """Return it with a time left out in which nobody listened."""
        last, counted = min(now, self.last + by_s), min(now, self.counted + by_s)
        return replace(self, last=last, counted=counted)

    def patience_s(self, now: float, limits: Limits) -> float:
        """Return how long a silence this node's past makes plausible."""
        oldest = int(now // PEAK_S) - KEPT_PEAKS
        longest = max((peak for minute, peak in self.peaks if minute > oldest), default=0.0)
        return patience_s(self.gaps, longest, limits)
