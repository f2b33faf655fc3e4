"""What submitit runs on each node: one agent, once."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import tenacity

from orchestrator.agent.loop import Agent
from orchestrator.config import RunConfig, thaw
from orchestrator.durable import write_json
from orchestrator.process_id import start_time

log = logging.getLogger(__name__)

NOTED_S = 600.0
POLL_S = 0.1
OLD_AGENT_S = 60.0
ADDRESS_S = 60.0


def run_agent(run_dir: str, local_job: str = "") -> None:
    """Be the agent of this node until told to leave.

    submitit has pickled a reference to this function, nothing else: the run is read from the
    frozen configuration in the run directory.

    Args:
        run_dir: The run's own directory.
        local_job: Id of the allocation when its nodes are tasks of this machine.
    """
    # submitit ignores SIGTERM in its tasks; an agent must obey it from here on. It outlives srun
    # and the batch host, and its last word to them.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _ignore()
    folder = Path(run_dir)
    job = _slurm_job()
    if job and not _is_wanted(folder, job):
        sys.stderr.write(f"job {job} is no allocation of the run; leaving\n")
        return
    node = os.environ["SLURMD_NODENAME"] if job else _local_node(folder, local_job)
    own = folder / "nodes" / node
    own.mkdir(parents=True, exist_ok=True)
    _write_to(own / "agent.log")
    with (own / "lock").open("w") as lock:
        if not _take(lock.fileno(), OLD_AGENT_S if job else 0.0):
            log.warning("%s already has an agent; leaving", node)
            return
        _announce(own, job or local_job)
        config = thaw(folder / "run.json")
        address = _own_address(folder) if job else "127.0.0.1"
        asyncio.run(_serve(config, node, own, address, job or local_job))


def _slurm_job() -> str:
    """Return the id of the Slurm job that this process is a task of, "" for none."""
    is_slurm = os.environ.get("SUBMITIT_EXECUTOR") == "slurm"
    return os.environ["SLURM_JOB_ID"] if is_slurm else ""


def _local_node(run_dir: Path, job: str) -> str:
    """Return the name that the launcher gave to this task of an allocation on this machine."""
    text = (run_dir / "submitit" / job / "nodes.json").read_text(encoding="utf-8")
    return str(json.loads(text)[int(os.environ["SUBMITIT_LOCAL_GLOBALID"])])


def _is_wanted(run_dir: Path, job: str) -> bool:
    """Wait until this job is noted as an allocation of the run; False when it is not in time.

    Whoever submitted may have died before it noted the job. The next supervisor then finds this
    job, or, when it cannot, makes another: two sets of agents must never be there.
    """
    deadline = time.monotonic() + NOTED_S
    while time.monotonic() < deadline:
        for path in (run_dir / "submitit").glob("*/job.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if str(json.loads(path.read_text(encoding="utf-8"))["job"]) == job:
                    return True
        time.sleep(POLL_S)
    return False


def _take(lock: int, for_s: float) -> bool:
    """Lock a file; the agent of an earlier allocation may still be about to leave the node."""
    deadline = time.monotonic() + for_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True


@tenacity.retry(
    retry=tenacity.retry_if_exception_type((OSError, ValueError)),
    stop=tenacity.stop_after_delay(ADDRESS_S),
    wait=tenacity.wait_exponential_jitter(multiplier=0.1, max=2.0),
    reraise=True,
)
def _own_address(run_dir: Path) -> str:
    """Return this node's address on the way to the supervisor; nothing is sent."""
    value = json.loads((run_dir / "supervisor.json").read_text(encoding="utf-8"))
    url = urlsplit(value["url"])
    found = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _ignore() -> None:
    for signum in (signal.SIGUSR2, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)


async def _serve(config: RunConfig, node: str, own: Path, address: str, job: str) -> None:
    node_dir = config.memory_root / node
    agent = Agent(config, node, node_dir, address, job)
    _listen(agent, in_slurm=bool(_slurm_job()))
    for folder in (node_dir.parent, node_dir):  # `parents=True` would not give them the mode
        folder.mkdir(exist_ok=True, mode=0o700)
    await agent.run()
    # Here and not behind the loop: that one gives signals, which the launcher may send by now,
    # their default action back.
    _stop_listening()
    with contextlib.suppress(OSError):  # the last agent of a machine takes the folder along
        node_dir.parent.rmdir()
    (own / "agent.json").unlink(missing_ok=True)


def _listen(agent: Agent, in_slurm: bool) -> None:
    """Say what signals mean from here on; Slurm's announce an end, they are not the end."""
    loop = asyncio.get_running_loop()
    _ignore()
    loop.add_signal_handler(signal.SIGINT, agent.shut_down)
    if in_slurm:
        loop.add_signal_handler(signal.SIGTERM, agent.leaving.terminated)
        loop.add_signal_handler(signal.SIGUSR2, agent.leaving.warned)
    else:
        loop.add_signal_handler(signal.SIGTERM, agent.shut_down)


def _stop_listening() -> None:
    """Let no signal end the process any more: it is about to end by itself, and well."""
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGUSR2):
        loop.remove_signal_handler(signum)
        signal.signal(signum, signal.SIG_IGN)


def _announce(own: Path, job: str) -> None:
    value = {"pid": os.getpid(), "started": start_time(os.getpid()), "job": job}
    write_json(own / "agent.json", value)


def _write_to(path: Path) -> None:
    """Send everything this process says to its own file: the launcher's pipe may die first."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
