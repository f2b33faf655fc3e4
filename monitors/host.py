"""Load and memory of this node, from procfs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from monitors.observations import Observation, Ok, Unknown

SOURCE = "procfs"
_PROC = Path("/proc")
_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReading:
    """One node at one moment.

    Attributes:
        load1: Mean number of processes that ran or waited to run, over the last minute.
        memory_total_bytes: Memory of the machine, not of a control group.
        memory_available_bytes: What programs could still get without swapping.
    """

    load1: float
    memory_total_bytes: int
    memory_available_bytes: int


def read_host(
    *, proc: Path = _PROC, clock: Callable[[], float] = time.time
) -> Observation[HostReading]:
    """Return the node's load and memory, `Unknown` where procfs does not tell.

    Args:
        proc: Where procfs is mounted.
        clock: Gives the time of the reading.
    """
    at = clock()
    try:
        load1 = float((proc / "loadavg").read_text("ascii").split()[0])
        memory = _meminfo((proc / "meminfo").read_text("ascii"))
        reading = HostReading(
            load1=load1,
            memory_total_bytes=memory["MemTotal"],
            memory_available_bytes=memory["MemAvailable"],
        )
    except (OSError, ValueError, KeyError, IndexError) as error:
        return Unknown(why=f"{type(error).__name__}: {error}", source=SOURCE, at=at)
    return Ok(value=reading, source=SOURCE, at=at)


def _meminfo(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {r[0].rstrip(":"): int(r[1]) * _KIB for r in rows if len(r) == 3 and r[2] == "kB"}
