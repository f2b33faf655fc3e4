"""Submits an allocation through submitit and notes its job id; run as a short-lived child.

Two calls for one run never make two allocations: a lock lets one at a time look for `job.json`,
and an agent that finds its node's lock taken leaves again.
"""

import fcntl
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

from orchestrator.launch.local import start_time

FOREVER_MIN = 60 * 24 * 365  # the run ends the allocation, not a clock


def main() -> None:
    """Read the request from the command line and submit it once."""
    request = json.loads(sys.argv[1])
    folder = Path(request["run_dir"]) / "submitit"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = folder / "job.json"
        if known.exists():
            job = json.loads(known.read_text(encoding="utf-8"))
            if job["key"] == request["key"]:
                return
        pid = int(submit(folder, request))
        value = {"pid": pid, "started": start_time(pid) or 0, "key": request["key"]}
        temporary = folder / ".job.json.new"
        temporary.write_text(json.dumps(value), encoding="utf-8")
        temporary.replace(known)


def submit(folder: Path, request: dict[str, Any]) -> str:
    """Hand the agents to submitit; one task per node."""
    import submitit

    executor = submitit.AutoExecutor(folder=folder, cluster="local")
    executor.update_parameters(
        name=request["name"],
        nodes=1,  # one machine; its tasks pose as nodes
        tasks_per_node=request["nodes"],
        gpus_per_node=request["gpus_per_node"],
        timeout_min=FOREVER_MIN,
    )
    job = executor.submit(pkgutil.resolve_name(request["entry"]), request["run_dir"])
    return str(job.job_id)


if __name__ == "__main__":
    main()
