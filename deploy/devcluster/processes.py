"""What /proc tells about processes: parents, start times, whose environment carries our mark."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from deploy.devcluster.errors import DevclusterError

# Every process of a cluster on the machine's side carries this variable; see `marked`.
MARK = "DEVCLUSTER_STATE"
POLL_S = 0.02
DEAD = "ZX"


def pids() -> Iterator[int]:
    """Every process that this process can see."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names only, no objects for thousands of them
        if name.isdecimal():
            yield int(name)


def _stat(pid: int) -> list[str]:
    """Fields of proc_pid_stat(5) from the third on; empty when there is no such process."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()
    return []


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    stat = _stat(pid)
    return bool(stat) and stat[0] not in DEAD


def start_time(pid: int) -> int | None:
    """Return when a process started, in ticks since boot: with the pid, its identity."""
    stat = _stat(pid)
    return int(stat[19]) if stat and stat[0] not in DEAD else None


def children(pid: int) -> tuple[int, ...]:
    """Return the living children of a process."""
    found = []
    for other in pids():
        stat = _stat(other)
        if stat and stat[0] not in DEAD and int(stat[1]) == pid:
            found.append(other)
    return tuple(found)


def marked(state: Path) -> tuple[int, ...]:
    """Return the living processes of the cluster in that folder, by the mark in their environment.

    Processes of jobs have another environment; they end with the first process of their node.
    """
    wanted = f"{MARK}={state}".encode()
    found = []
    for pid in pids():
        with suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if wanted in environ and is_alive(pid):
                found.append(pid)
    return tuple(pid for pid in found if pid != os.getpid())


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal; a process that is gone is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(
    what: str, ready: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S
) -> None:
    """Wait for a condition; `what` says in the error what did not happen.

    Raises:
        DevclusterError: It did not come true in time; names it.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise DevclusterError(f"{what}: not within {timeout_s:g} s")
        time.sleep(poll_s)
