"""A process of this machine, told apart from a later one with the same pid."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process, also distinct from a later one with the same pid."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return start_time(self.pid) == self.started


def start_time(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot, None when it does not run.

    Source: proc_pid_stat(5), fields 3 (state) and 22 (starttime).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
