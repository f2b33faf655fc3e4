"""What goes on inside the nodes of a devcluster, seen from the machine."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.devcluster.client import Devcluster
from orchestrator.process_id import start_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A living process on a node.

    Attributes:
        pid: As the machine sees it.
        inner: The pid that the node's own processes, and so the journal, know it by.
    """

    pid: int
    inner: int
    node: str
    command: str


def power(cluster: Devcluster) -> dict[str, int]:
    """Return the first process of every node that has power."""
    return {
        name: node["pid"] for name, node in cluster.nodes().items() if isinstance(node["pid"], int)
    }


def processes(inits: dict[str, int]) -> Iterator[Process]:
    """Yield what runs on nodes besides their first process and Slurm's daemons.

    The step daemon of a job whose batch host died looks for it a while before it ends.
    """
    nodes = {namespace(pid): name for name, pid in inits.items()}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        node = nodes.get(namespace(pid), "")
        if not node or pid in inits.values() or start_time(pid) is None:
            continue
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            if command and not command.startswith(("slurmd ", "slurmstepd: ")):
                yield Process(pid=pid, inner=_inner(folder), node=node, command=command)


def _inner(folder: Path) -> int:
    """Return a process's pid in its own namespace; source: proc_pid_status(5), NSpid."""
    status = (folder / "status").read_text(encoding="utf-8", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])


def namespace(pid: int) -> str:
    """Return the pid namespace that a process is in, "" when it is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def memory(inits: dict[str, int]) -> list[str]:
    """Return what lies in the nodes' /dev/shm."""
    found: list[str] = []
    for name, pid in inits.items():
        with suppress(OSError):
            entries = Path(f"/proc/{pid}/root/dev/shm").iterdir()
            found += [f"{name}: {entry.name}" for entry in entries]
    return found
