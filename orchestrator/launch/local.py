"""Nodes on this machine through submitit's local executor: one job, one task per node.

The allocation is submitted by a short-lived child (`launch.submit`) in a session of its own, so
that neither Ctrl-C in the supervisor's terminal nor its death reaches the nodes.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from monitors.observations import Observation, Ok, Unknown
from orchestrator.launch.launcher import Allocation, AllocationSpec, LaunchRefusedError
from orchestrator.process_id import ProcessId

SUBMIT_TIMEOUT_S = 60.0
CANCEL_TIMEOUT_S = 30.0
CANCEL_EVERY_S = 0.2


class LocalLauncher:
    """Launcher for one machine.

    Args:
        run_dir: The files of an allocation lie in `run_dir/submitit`.
        memory: What the nodes keep in memory. That of a real node ends with it; here the
            launcher sees to it.
    """

    def __init__(self, run_dir: Path, memory: Path) -> None:
        self._run_dir = run_dir
        self._memory = memory

    def submit(self, spec: AllocationSpec) -> str:
        """Start the agents; see `Launcher.submit`."""
        folder = self._run_dir / "submitit"
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            "cluster": "local",
            "key": spec.key,
            "name": spec.name,
            "nodes": spec.nodes,
            "gpus_per_node": spec.gpus_per_node,
            "run_dir": str(spec.run_dir),
            "entry": spec.entry,
        }
        command = [sys.executable, "-m", "orchestrator.launch.submit", json.dumps(request)]
        # No pipe to the child: the controller inherits it and would hold it open for ever.
        with (folder / "controller.log").open("ab") as log:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
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
        controller = _process(folder / "job.json")
        assert controller is not None, "the child writes it before it exits with 0"
        return str(controller.pid)

    def observe(self, job: str, *, fresh: bool = False) -> Observation[Allocation]:  # noqa: ARG002 - every look is
        """Look at the controller's and the agents' processes; see `Launcher.observe`."""
        at = time.time()
        try:
            controller = _process(self._run_dir / "submitit" / "job.json")
            nodes = {
                path.parent.name: process.is_alive
                for path in sorted((self._run_dir / "nodes").glob("*/agent.json"))
                if (process := _process(path)) is not None
            }
        except (OSError, ValueError) as error:
            return Unknown(why=f"cannot look at {self._run_dir}: {error}", source="local", at=at)
        running = controller is not None and controller.is_alive
        return Ok(
            value=Allocation(job=job, running=running or any(nodes.values()), nodes=nodes),
            source="local",
            at=at,
        )

    def unhold(self, job: str, exclude: Sequence[str]) -> None:  # noqa: ARG002 - nothing to exclude
        """Refuse: nothing is ever held here; see `Launcher.unhold`."""
        raise LaunchRefusedError(f"allocation {job} is not held")

    def cancel(self, job: str) -> None:  # noqa: ARG002 - a run directory has one allocation
        """End the controller and whatever is left of the agents; see `Launcher.cancel`.

        The signal is repeated: a process that is just starting may miss one. The controller
        passes it on to tasks without a name yet, and ends by itself when they have ended.
        """
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        while (left := self._living()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
            time.sleep(CANCEL_EVERY_S)
        for process in self._living():  # deaf to SIGTERM; their memory is about to go
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        shutil.rmtree(self._memory, ignore_errors=True)

    def _living(self) -> list[ProcessId]:
        agents = (self._run_dir / "nodes").glob("*/agent.json")
        found: list[ProcessId] = []
        for path in (*agents, self._run_dir / "submitit" / "job.json"):
            with contextlib.suppress(OSError, ValueError):
                process = _process(path)
                if process is not None and process.is_alive:
                    found.append(process)
        return found


def _process(path: Path) -> ProcessId | None:
    """Read who is noted in a file, None without one; raises ValueError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return ProcessId(pid=int(value["pid"]), started=int(value["started"]))
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} names no process") from error
