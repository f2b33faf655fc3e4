"""How much memory an arena may take: shared memory, the machine's, and this process's cgroups."""

import os
from collections.abc import Iterator
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
    in_cgroups = [left for group in _cgroups() if (left := _left_in(group)) is not None]
    if in_cgroups:
        room["cgroup memory.max"] = min(in_cgroups)
    return room


def gib(nbytes: int) -> str:
    """Return bytes for a person."""
    return f"{nbytes / 2**30:.2f} GiB"


def _cgroups() -> Iterator[Path]:
    """Yield this process's cgroup and those around it: a batch system limits an outer one."""
    own = _CGROUP / _own_cgroup()
    yield own
    yield from (outer for outer in own.parents if outer.is_relative_to(_CGROUP))


def _own_cgroup() -> str:
    try:
        line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
    except (OSError, IndexError):
        return ""
    return line.rpartition("::")[2].lstrip("/")


def _left_in(cgroup: Path) -> int | None:
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return None
    # The page cache counts as used but is given up on demand.
    return limit - used + (_cgroup_stat(cgroup, "inactive_file") or 0)


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


def _cgroup_stat(cgroup: Path, name: str) -> int | None:
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None
