"""Failure rates as Gamma posteriors, per class of fault.

The rate, not its inverse, is what the loss is linear in, so the posterior mean of the rate is what
the tuner uses: the mean time between failures of a young posterior is infinite or wild.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

DAY_S: Final = 86_400.0
COALESCE_S: Final = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaRate:
    """What is known of a failure rate per node and second.

    Attributes:
        events: Shape of the posterior: prior weight plus incidents.
        exposure_node_s: Rate of the posterior: prior exposure plus observed node seconds.
        prior_events: Shape of the prior, below which forgetting never goes.
        prior_exposure_node_s: Exposure of the prior.
    """

    events: float
    exposure_node_s: float
    prior_events: float
    prior_exposure_node_s: float

    @classmethod
    def prior(cls, per_1000_node_days: float, weight: float = 2.0) -> "GammaRate":
        """Start from a published rate that counts as much as `weight` incidents.

        Raises:
            ValueError: The rate or the weight is not positive.
        """
        if per_1000_node_days <= 0 or weight <= 0:
            raise ValueError("prior rate and weight must be positive")
        exposure = weight * 1000.0 * DAY_S / per_1000_node_days
        return cls(
            events=weight,
            exposure_node_s=exposure,
            prior_events=weight,
            prior_exposure_node_s=exposure,
        )

    @property
    def mean_per_node_s(self) -> float:
        """Posterior mean of the rate of one node."""
        return self.events / self.exposure_node_s

    def observe(self, incidents: float, exposure_node_s: float) -> "GammaRate":
        """Add incidents seen during some node seconds."""
        if incidents < 0 or exposure_node_s < 0:
            raise ValueError("incidents and exposure cannot be negative")
        return GammaRate(
            events=self.events + incidents,
            exposure_node_s=self.exposure_node_s + exposure_node_s,
            prior_events=self.prior_events,
            prior_exposure_node_s=self.prior_exposure_node_s,
        )

    def forget(self, elapsed_s: float, half_life_s: float = 3 * DAY_S) -> "GammaRate":
        """Fade what was observed; the prior never fades."""
        keep = 0.5 ** (max(elapsed_s, 0.0) / half_life_s)
        seen = self.exposure_node_s - self.prior_exposure_node_s
        return GammaRate(
            events=self.prior_events + keep * (self.events - self.prior_events),
            exposure_node_s=self.prior_exposure_node_s + keep * seen,
            prior_events=self.prior_events,
            prior_exposure_node_s=self.prior_exposure_node_s,
        )


def coalesce(at: Iterable[float], within_s: float = COALESCE_S) -> Sequence[float]:
    """Merge moments closer than `within_s` to the one before: bursts are one incident."""
    kept: list[float] = []
    last = float("-inf")
    for moment in sorted(at):
        if moment - last > within_s:
            kept.append(moment)
        last = moment
    return tuple(kept)
