"""How much memory an arena may take: shared memory, the machine's, and this process's cgroups."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60  # what version 1 says for no limit is about 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """How one of the two kinds of control groups says what it limits.

    Attributes:
        controllers: Third field of the line in /proc/self/cgroup.
        root: Where they are mounted, below `_CGROUP`.
        limit: File with the limit.
        used: File with what is used.
        given_up: What in `memory.stat` is page cache that is given up on demand.
    """

    controllers: str
    root: str
    limit: str
    used: str
    given_up: str


_VERSIONS: Final = (
    _Version(
        controllers="",
        root="",
        limit="memory.max",
        used="memory.current",
        given_up="inactive_file",
    ),
    _Version(
        controllers="memory",
        root="memory",
        limit="memory.limit_in_bytes",
        used="memory.usage_in_bytes",
        given_up="total_inactive_file",
    ),
)


def room_for(folder: Path) -> dict[str, int]:
    """Return the free bytes by what limits them; what cannot be read is left out."""
    stat = os.statvfs(folder)
    room = {str(folder): stat.f_bavail * stat.f_frsize}
    available = _meminfo("MemAvailable")
    if available is not None:
        room["MemAvailable"] = available
    for version in _VERSIONS:
        lefts = (_left_in(group, version) for group in _groups(version))
        known = [left for left in lefts if left is not None]
        if known:
            room[f"cgroup {version.limit}"] = min(known)
    return room


def gib(nbytes: int) -> str:
    """Return bytes for a person."""
    return f"{nbytes / 2**30:.2f} GiB"


def _groups(version: _Version) -> Iterator[Path]:
    """Yield this process's cgroup and those around it: a batch system limits an outer one."""
    root = _CGROUP / version.root
    own = root / _own_cgroup(version.controllers)
    yield own
    yield from (outer for outer in own.parents if outer.is_relative_to(root))


def _own_cgroup(controllers: str) -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == controllers or (controllers and controllers in names.split(",")):
            return path.lstrip("/")
    return ""


def _left_in(cgroup: Path, version: _Version) -> int | None:
    limit, used = _number(cgroup / version.limit), _number(cgroup / version.used)
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    return limit - used + (_cgroup_stat(cgroup, version.given_up) or 0)


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
