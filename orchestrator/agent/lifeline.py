"""How processes of a node hang together: what dies with whom, and who reaps orphans."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path

from orchestrator.process_id import start_time

PR_SET_PDEATHSIG = 1  # prctl(2)
PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: the child only calls it


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends.

    A SIGKILLed agent runs no clean-up; without this its ranks would train on, unwatched.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start_as_rank() -> None:
    """Make a child, before its exec, what a rank is to be: bound to the agent, deaf to SIGUSR2.

    Slurm sends its warning to all processes of a step. It is for the agent, and would end a script
    that knows nothing of it.
    """
    die_with_parent()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def start_as_companion() -> None:
    """As `start_as_rank`, and deaf to SIGTERM too: it ends when its agent says so."""
    start_as_rank()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def start_as_zygote() -> None:
    """As `start_as_rank`, with SIGTERM held back, not ignored: a forked rank lets it through."""
    start_as_rank()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants, as forked ranks are."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Orphans:
    """Reaps dead children that nobody here waits for: what ranks left behind.

    A child that somebody waits for is reaped within moments of its death, so one that is dead at
    two looks in a row is an orphan.
    """

    def __init__(self) -> None:
        self._dead: frozenset[int] = frozenset()

    def reap(self, awaited: Collection[int] = ()) -> None:
        """Look once; call it every few seconds. `awaited` are pids that somebody waits for."""
        dead = frozenset(
            pid for pid in _children() if pid not in awaited and start_time(pid) is None
        )
        for pid in dead & self._dead:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._dead = dead


def _children() -> list[int]:
    """Return the children of all threads of this process; source: proc_pid_task_children(5)."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text("ascii").split())
    return found
