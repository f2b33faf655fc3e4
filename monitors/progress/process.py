"""What is abnormal about one process by itself, which tells a stuck rank from a waiting one."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
# D (uninterruptible) is left out: a healthy process passes through it all the time.
_ABNORMAL = {
    "T": "process is stopped",
    "t": "process is held by a debugger",
    "Z": "process is dead and not reaped",
}


def abnormal(pid: int, *, proc: Path = _PROC) -> str:
    """Return one phrase when the process cannot run, "" when it can or nobody knows.

    Args:
        pid: A process of this machine.
        proc: Where procfs is mounted.
    """
    try:
        stat = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name in parentheses may itself hold spaces and parentheses.
    state = stat.rpartition(")")[2].split()[:1]
    return _ABNORMAL.get(state[0], "") if state else ""
