"""What one GPU says about itself, in base units, whoever was asked."""

from __future__ import annotations

from dataclasses import dataclass

from monitors.observations import NotMeasured, Observation, Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU at one moment. Every field may be unknown or not measured by itself.

    Attributes:
        index: Position on the node; may change when a GPU drops out, so join on `uuid`.
        uuid: Name that stays with the device, "" when it did not answer.
        busy_ratio: Share of the last sample window with at least one kernel running. A rank that
            spins in a collective shows 1.0: this cannot tell work from a hang.
        memory_used_bytes: Device memory in use by anybody.
        memory_total_bytes: Device memory there is.
        power_watts: Draw of the board.
        temperature_celsius: Temperature of the chip.
    """

    index: int
    uuid: str
    busy_ratio: Observation[float]
    memory_used_bytes: Observation[float]
    memory_total_bytes: Observation[float]
    power_watts: Observation[float]
    temperature_celsius: Observation[float]


def unanswered(index: int, uuid: str, answer: Unknown | NotMeasured) -> GpuReading:
    """Return the reading of a GPU that told nothing at all."""
    return GpuReading(
        index=index,
        uuid=uuid,
        busy_ratio=answer,
        memory_used_bytes=answer,
        memory_total_bytes=answer,
        power_watts=answer,
        temperature_celsius=answer,
    )
