"""How much memory an arena may take: shared memory, the machine's, and this process's cgroup."""

import os
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")


def room_for(folder: Path) -> dict[str, int]:
    """Return the free bytes by what limits them; what cannot be read is left out."""
    stat = os.statvfs(folder)
    room = {str(folder): stat.f_bavail * stat.f_frsize}
    available = _meminfo("MemAvailable")
    if available is not None:
        room["MemAvailable"] = available
    limit, used = _number(_cgroup() / "memory.max"), _number(_cgroup() / "memory.current")
    if limit is not None and used is not None:
        # The page cache counts as used but is given up on demand.
        room["cgroup memory.max"] = limit - used + (_cgroup_stat("inactive_file") or 0)
    return room


def gib(nbytes: int) -> str:
    """Return bytes for a person."""
    return f"{nbytes / 2**30:.2f} GiB"


def _cgroup() -> Path:
    try:
        line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
    except (OSError, IndexError):
        return _CGROUP
    inner = _CGROUP / line.rpartition("::")[2].lstrip("/")
    return inner if (inner / "memory.max").exists() else _CGROUP


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such controller, or "max"
        return None


def _cgroup_stat(name: str) -> int | None:
    try:
        lines = (_cgroup() / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None
