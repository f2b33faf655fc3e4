"""What other exporters call the things that we read, and in which unit.

dcgm-exporter renamed many fields and changed units in 4.9.0, so both families are known.
See https://github.com/NVIDIA/dcgm-exporter/releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_MIB = float(1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuField:
    """Field of a `GpuReading` and the factor that brings a sample to its base unit."""

    field: str
    factor: float = 1.0


def _ours(name: str) -> GpuField:
    return GpuField(field=name)


GPU_FIELDS: Mapping[str, GpuField] = MappingProxyType(
    {
        "everstep_gpu_busy_ratio": _ours("busy_ratio"),
        "everstep_gpu_memory_used_bytes": _ours("memory_used_bytes"),
        "everstep_gpu_memory_total_bytes": _ours("memory_total_bytes"),
        "everstep_gpu_power_watts": _ours("power_watts"),
        "everstep_gpu_temperature_celsius": _ours("temperature_celsius"),
        "DCGM_FI_DEV_GPU_UTIL": GpuField(field="busy_ratio", factor=0.01),
        "DCGM_FI_DEV_FB_USED": GpuField(field="memory_used_bytes", factor=_MIB),
        "DCGM_FI_DEV_FB_TOTAL": GpuField(field="memory_total_bytes", factor=_MIB),
        "DCGM_FI_DEV_POWER_USAGE": GpuField(field="power_watts"),
        "DCGM_FI_DEV_GPU_TEMP": GpuField(field="temperature_celsius"),
        "DCGM_FI_DEV_GPU_UTIL_RATIO": GpuField(field="busy_ratio"),
        "DCGM_FI_DEV_FB_USED_BYTES": GpuField(field="memory_used_bytes"),
        "DCGM_FI_DEV_FB_CAPACITY_BYTES": GpuField(field="memory_total_bytes"),
        "DCGM_FI_DEV_BOARD_POWER_WATTS": GpuField(field="power_watts"),
        "DCGM_FI_DEV_GPU_TEMP_CELSIUS": GpuField(field="temperature_celsius"),
    }
)

# DCGM writes "blank" as a very large number of its type: doubles from here on, ints far above.
BLANK_FROM = 140737488355328.0
# Device memory in bytes is the largest true value; blanks of 32-bit fields are caught by name.
BLANK_INT32 = frozenset(float(0x7FFFFFF0 + i) for i in range(16))
