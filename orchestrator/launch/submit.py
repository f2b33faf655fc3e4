"""Submits an allocation through submitit and notes how it is found; run as a short-lived child.

Two calls with one key never make two allocations: a lock lets one at a time look for `job.json`,
and an agent that finds its node's lock taken, or Slurm's job not noted, leaves again.
"""

import fcntl
import pkgutil
from pathlib import Path
from typing import Any

from orchestrator.launch.folders import note_of, write_note
from orchestrator.launch.slurm_child import request_given, told_by_exit
from orchestrator.launch.slurm_submit import submit_once
from orchestrator.process_id import start_time

FOREVER_MIN = 60 * 24 * 365  # the run ends the allocation, not a clock


def main() -> None:
    """Read the request from standard input and submit it once."""
    request = request_given()
    folder = Path(request["folder"])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if note_of(folder).get("key") == request["key"]:
            return
        with told_by_exit():
            value = _submit(folder, request)
        write_note(folder, {**value, "key": request["key"]})


def _submit(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return how the job is found again: by its number in Slurm, or by its controller here."""
    if request["cluster"] == "slurm":
        return {"job": submit_once(folder, request)}
    pid = int(submit_here(folder, request))
    return {"job": folder.name, "pid": pid, "started": start_time(pid) or 0}


def submit_here(folder: Path, request: dict[str, Any]) -> str:
    """Hand the agents to submitit's local executor; one task per node."""
    import submitit

    executor = submitit.AutoExecutor(folder=folder, cluster="local")
    executor.update_parameters(
        name=request["name"],
        nodes=1,  # one machine; its tasks pose as nodes
        tasks_per_node=request["nodes"],
        gpus_per_node=request["gpus_per_node"],
        timeout_min=FOREVER_MIN,
    )
    agent = pkgutil.resolve_name(request["entry"])
    return str(executor.submit(agent, request["run_dir"], folder.name).job_id)


if __name__ == "__main__":
    main()
