"""Learning-rate schedules: pure functions of the step, so a resume needs no state."""

import math
from dataclasses import dataclass
from enum import StrEnum


class ScheduleKind(StrEnum):
    """Shape of the learning rate over the run."""

    COSINE = "cosine"
    WSD = "wsd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up, then cosine decay, or a constant phase and a linear decay (WSD).

    In WSD (Hu et al., MiniCPM, arXiv 2404.06395) the rates of the constant phase do not depend on
    the length of the run, which may be extended before the decay begins.

    Attributes:
        peak: highest learning rate.
        steps: length of the run.
        warmup: steps of the warm-up.
        floor: the last learning rate as a fraction of the peak.
        decay: part of the run that WSD spends on its decay.
    """

    kind: ScheduleKind
    peak: float
    steps: int
    warmup: int
    floor: float = 0.1
    decay: float = 0.2

    def lr(self, step: int) -> float:
        """Return the learning rate of a step (from 0)."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        start = self.warmup
        if self.kind is ScheduleKind.WSD:
            start = max(start, self.steps - round(self.steps * self.decay))
        progress = min(1.0, max(0.0, (step + 1 - start) / max(1, self.steps - start)))
        if self.kind is ScheduleKind.COSINE:
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        else:
            left = 1.0 - progress
        return self.peak * (self.floor + (1.0 - self.floor) * left)
