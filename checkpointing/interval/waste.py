"""The share of time lost for a checkpoint interval, and the interval that loses least.

With S the interval, d the blocking stall of a save, U the time until it is durable, g the
fractional slow-down of steps while uploading, R the time of a restart and lambda the rate of
faults of the whole job (first order; Young 1974, Daly 2006, with the upload in the background):

    waste(S) = (d + g U) / S + lambda (S / 2 + U + R)
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one checkpoint and one restart cost.

    Attributes:
        stall_s: Seconds that a save blocks every rank (d).
        upload_s: Seconds until a save is durable (U).
        slowdown: Fraction by which steps get longer during an upload (g).
        restart_s: Seconds from a fault to the first step after it (R).
    """

    stall_s: float
    upload_s: float
    slowdown: float
    restart_s: float

    @property
    def per_save_s(self) -> float:
        """Seconds of training that one save costs."""
        return self.stall_s + self.slowdown * self.upload_s

    @property
    def floor_s(self) -> float:
        """Shortest interval at which uploads do not pile up."""
        return self.upload_s + self.stall_s


def waste(interval_s: float, costs: Costs, rate_per_s: float) -> float:
    """Return the share of time that is not training, at most 1."""
    if interval_s <= 0:
        return 1.0
    lost = interval_s / 2 + costs.upload_s + costs.restart_s
    return min(1.0, costs.per_save_s / interval_s + rate_per_s * lost)


def unbounded_optimum_s(costs: Costs, rate_per_s: float) -> float:
    """Return the interval that loses least when nothing else limits it; inf without faults."""
    if rate_per_s <= 0:
        return math.inf
    return math.sqrt(2 * costs.per_save_s / rate_per_s)


def optimum_s(costs: Costs, rate_per_s: float) -> float:
    """Return the interval that loses least and still lets each upload finish."""
    return max(costs.floor_s, unbounded_optimum_s(costs, rate_per_s))
