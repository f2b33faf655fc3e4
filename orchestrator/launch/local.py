"""Nodes on this machine through submitit's local executor: a job per allocation, a task per node.

An allocation is submitted by a short-lived child (`launch.submit`) in a session of its own, so
that neither Ctrl-C in the supervisor's terminal nor its death reaches the nodes. Its id is the
name of its folder, and known before it is submitted: that of a controller would be another one
when the submission has to be repeated, while the agents that came of the first one stay.
"""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from monitors.observations import Observation, Ok, Unknown
from orchestrator.core.events import Ending
from orchestrator.durable import write_json
from orchestrator.launch.folders import NOTE, folder_of, folders_in, home
from orchestrator.launch.launcher import Allocation, AllocationSpec, LaunchRefusedError
from orchestrator.process_id import ProcessId

SUBMIT_TIMEOUT_S = 60.0
CANCEL_TIMEOUT_S = 30.0
CANCEL_EVERY_S = 0.2
NODES = "nodes.json"


class LocalLauncher:
    """Launcher for one machine; an allocation's id is the name of its folder.

    Args:
        run_dir: The files of the allocations lie in folders of `run_dir/submitit`.
        memory: What the nodes keep in memory. That of a real node ends with it; here the
            launcher sees to it.
    """

    def __init__(self, run_dir: Path, memory: Path) -> None:
        self._run_dir = run_dir.absolute()
        self._memory = memory

    def submit(self, spec: AllocationSpec) -> str:
        """Start the agents; see `Launcher.submit`."""
        folder = folder_of(spec)
        folder.mkdir(parents=True, exist_ok=True)
        self._name_nodes(folder, spec)
        request = {
            "cluster": "local",
            "folder": str(folder),
            "key": spec.key,
            "name": spec.name,
            "nodes": spec.nodes,
            "gpus_per_node": spec.gpus_per_node,
            "run_dir": str(self._run_dir),
            "entry": spec.entry,
        }
        command = [sys.executable, "-m", "orchestrator.launch.submit"]
        # No pipe from the child: the controller inherits it and would hold it open for ever.
        with (folder / "controller.log").open("ab") as log:
            try:
                done = subprocess.run(
                    command,
                    input=json.dumps(request).encode(),
                    stdout=log,
                    stderr=log,
                    timeout=SUBMIT_TIMEOUT_S,
                    start_new_session=True,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                text = f"submitting took longer than {SUBMIT_TIMEOUT_S:g} s"
                raise LaunchRefusedError(f"{text}; see {log.name}") from error
            if done.returncode != 0:
                raise LaunchRefusedError(f"submitting failed; see {log.name}")
        return folder.name

    def _name_nodes(self, folder: Path, spec: AllocationSpec) -> None:
        """Give each task the name of its node: names that no allocation of this run had before.

        They are written before anything is started, so that a submission that is repeated starts
        agents that find their nodes taken.
        """
        path = folder / NODES
        with (home(self._run_dir) / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return
            used = [name for other in folders_in(self._run_dir) for name in _nodes_of(other)]
            first = 1 + max((int(name.removeprefix("node")) for name in used), default=-1)
            names = (
                name for n in itertools.count(first) if (name := f"node{n}") not in spec.exclude
            )
            write_json(path, [*itertools.islice(names, spec.nodes)])

    def observe(self, job: str, *, fresh: bool = False) -> Observation[Allocation]:  # noqa: ARG002 - every look is
        """Look at the controller's and the agents' processes; see `Launcher.observe`."""
        at = time.time()
        folder = home(self._run_dir) / job
        try:
            controller = _process(folder / NOTE)
            nodes = {
                name: process.is_alive
                for name in _nodes_of(folder)
                if (process := _process(self._agent(name))) is not None
            }
        except (OSError, ValueError) as error:
            return Unknown(why=f"cannot look at {folder}: {error}", source="local", at=at)
        running = any(nodes.values()) or (controller is not None and controller.is_alive)
        value = Allocation(
            job=job,
            running=running,
            nodes=nodes,
            ending=None if running else _ending(controller, nodes),
        )
        return Ok(value=value, source="local", at=at)

    def unhold(self, job: str, exclude: Sequence[str]) -> None:  # noqa: ARG002 - nothing to exclude
        """Refuse: nothing is ever held here; see `Launcher.unhold`."""
        raise LaunchRefusedError(f"allocation {job} is not held")

    def cancel(self, job: str) -> None:
        """End the controller and whatever is left of the agents; see `Launcher.cancel`.

        The signal is repeated: a process that is just starting may miss one. The controller
        passes it on to tasks without a name yet, and ends by itself when they have ended.
        """
        ours = folders_in(self._run_dir)
        folders = [folder for folder in ours if job in ("", folder.name)]
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        while (left := self._living(folders)) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
            time.sleep(CANCEL_EVERY_S)
        for process in self._living(folders):  # deaf to SIGTERM; their memory is about to go
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for name in self._names(folders):
            shutil.rmtree(self._memory / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # the last allocation takes the folder along
            self._memory.rmdir()

    def _living(self, folders: Sequence[Path]) -> list[ProcessId]:
        agents = (self._agent(name) for name in self._names(folders))
        found: list[ProcessId] = []
        for path in (*agents, *(folder / NOTE for folder in folders)):
            with contextlib.suppress(OSError, ValueError):
                process = _process(path)
                if process is not None and process.is_alive:
                    found.append(process)
        return found

    def _names(self, folders: Sequence[Path]) -> list[str]:
        names: list[str] = []
        for folder in folders:
            with contextlib.suppress(OSError, ValueError):
                names += _nodes_of(folder)
        return names

    def _agent(self, node: str) -> Path:
        return self._run_dir / "nodes" / node / "agent.json"


def _nodes_of(folder: Path) -> tuple[str, ...]:
    """Read the names of an allocation's nodes; () when none were given yet."""
    try:
        return tuple(json.loads((folder / NODES).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ()


def _ending(controller: ProcessId | None, nodes: Mapping[str, bool]) -> Ending:
    """Say how an allocation ended: agents that left by themselves have taken back their names."""
    if controller is None:
        return Ending.UNKNOWN
    return Ending.FAILED if nodes else Ending.COMPLETED


def _process(path: Path) -> ProcessId | None:
    """Read who is noted in a file, None without one; raises ValueError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return ProcessId(pid=int(value["pid"]), started=int(value["started"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} names no process") from error
