"""Processes of a run on this machine: looked up by pid, killed by pid, never by name."""

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from orchestrator.config import RunConfig
from orchestrator.process_id import start_time

GONE_S = 10.0


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return start_time(pid) is not None


def agent_pid(run_dir: Path, node: str) -> int:
    """Return the pid that a node's agent announced."""
    announced = json.loads((run_dir / "nodes" / node / "agent.json").read_text(encoding="utf-8"))
    return int(announced["pid"])


def kill(pid: int) -> None:
    """SIGKILL one process; one that is gone is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> tuple[int, ...]:
    """Return the children of a process and theirs, and so on; source: proc_pid_stat(5), field 4."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            text = stat.read_text(encoding="utf-8", errors="replace")
            parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return tuple(found[1:])


def power_off(config: RunConfig, node: str) -> None:
    """End a node as a power failure does: every process at once, and its memory."""
    agent = agent_pid(config.run_dir, node)
    below = descendants(agent)
    for pid in (agent, *below):
        kill(pid)
    shutil.rmtree(config.memory_root / node, ignore_errors=True)


def end_run(config: RunConfig, supervisor: int | None) -> None:
    """End whatever is left of a run, for a demo that was interrupted."""
    if supervisor is not None:
        kill(supervisor)
    left: list[int] = []
    announced = [*(config.run_dir / "nodes").glob("*/agent.json")]
    for path in (*(config.run_dir / "submitit").glob("*/job.json"), *announced):
        with suppress(OSError, ValueError):
            process = json.loads(path.read_text(encoding="utf-8"))
            if start_time(process["pid"]) == process["started"]:
                left += [process["pid"], *descendants(process["pid"])]
    for pid in left:
        kill(pid)
    deadline = time.monotonic() + GONE_S
    while any(is_alive(pid) for pid in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    shutil.rmtree(config.memory_root, ignore_errors=True)
