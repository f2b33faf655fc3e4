"""CPU cgroups, version 1 and 2: one group per node, so that one node can be made slow."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.devcluster.errors import DevclusterError, PreconditionError
from deploy.devcluster.plan import Plan

MOUNTS = Path("/proc/self/mountinfo")
PERIOD_US = 100_000
LEAST_QUOTA_US = 1_000
REMOVE_TRIES = 40
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """Where the CPU controller is mounted, and of which version (1 or 2) it is."""

    mount: Path
    version: int

    @property
    def file(self) -> str:
        """The file that holds a group's quota."""
        return "cpu.max" if self.version == 2 else "cpu.cfs_quota_us"

    def quota(self, cpus: float | None) -> str:
        """Return the text to write for so many CPUs; None lifts the limit."""
        if cpus is None:
            return f"max {PERIOD_US}" if self.version == 2 else "-1"
        quota = max(LEAST_QUOTA_US, round(cpus * PERIOD_US))
        return f"{quota} {PERIOD_US}" if self.version == 2 else str(quota)

    def cpus(self, text: str) -> float | None:
        """Read a quota back; None is no limit."""
        quota = text.split()[0]
        return None if quota in ("max", "-1") else int(quota) / PERIOD_US


def parse(mountinfo: str) -> tuple[Path | None, Path | None]:
    """Return where cgroup v1's cpu controller and cgroup v2 are mounted.

    Source: proc_pid_mountinfo(5): the mount point is the fifth field; after " - " come the type,
    the source and the options of the file system, among them the v1 controllers.
    """
    first: Path | None = None
    second: Path | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, *_, options = right.split()
        point = Path(left.split()[4])
        if kind == "cgroup" and "cpu" in options.split(","):
            first = first or point
        elif kind == "cgroup2":
            second = second or point
    return first, second


def controller() -> Controller | None:
    """Return the CPU controller of this machine, or None when it cannot be used."""
    first, second = parse(MOUNTS.read_text(encoding="utf-8", errors="replace"))
    if first is not None and os.access(first, os.W_OK):  # read-only in many containers
        return Controller(mount=first, version=1)
    with suppress(OSError):
        if (
            second is not None
            and os.access(second, os.W_OK)
            and "cpu" in (second / "cgroup.controllers").read_text().split()
        ):
            return Controller(mount=second, version=2)
    return None


def _folder(plan: Plan, its: Controller) -> Path:
    return its.mount / f"devcluster.{plan.spec.name}"


def create(plan: Plan, node: str) -> Path | None:
    """Make the group of a node and return it; None where there is no CPU controller."""
    its = controller()
    if its is None:
        return None
    parent = _folder(plan, its)
    try:
        (parent / node).mkdir(parents=True, exist_ok=True)
        if its.version == 2:
            for above in (its.mount, parent):
                (above / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
    except OSError:
        return None  # `throttle` says so when asked
    return parent / node


def group(plan: Plan, node: str) -> Path | None:
    """Return the group of a node, or None when it has none."""
    its = controller()
    folder = None if its is None else _folder(plan, its) / node
    return folder if folder is not None and folder.is_dir() else None


def throttle(plan: Plan, node: str, cpus: float | None) -> None:
    """Limit a node to so many CPUs of the machine; None lifts the limit.

    Raises:
        PreconditionError: There is no CPU controller.
    """
    its = controller()
    folder = group(plan, node)
    if its is None or folder is None or not (folder / its.file).exists():
        raise PreconditionError(
            "throttle needs the cpu cgroup (v1 or v2), which is not usable here"
        )
    try:
        if its.version == 1:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="ascii")
        (folder / its.file).write_text(its.quota(cpus), encoding="ascii")
    except OSError as error:
        raise DevclusterError(f"cannot throttle {node}: {error}") from error


def limit(plan: Plan, node: str) -> float | None:
    """Return how many CPUs a node may use; None is no limit."""
    its = controller()
    with suppress(OSError, ValueError, IndexError):
        if its is not None:
            text = (_folder(plan, its) / node / its.file).read_text(encoding="ascii")
            return its.cpus(text)
    return None


def remove(plan: Plan) -> None:
    """Remove the groups of a cluster whose processes are gone."""
    its = controller()
    if its is None:
        return
    folder = _folder(plan, its)
    for _ in range(REMOVE_TRIES):
        if not folder.exists():
            return
        with suppress(OSError):  # the kernel counts a process as gone a little later than /proc
            for node in folder.iterdir():
                if node.is_dir():
                    node.rmdir()
            folder.rmdir()
            return
        time.sleep(POLL_S)
    raise DevclusterError(f"{folder} cannot be removed: a process is still in it")
