"""What submitit runs on each node: one agent, once."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
from pathlib import Path

from orchestrator.agent.loop import Agent
from orchestrator.config import RunConfig, thaw
from orchestrator.launch.local import start_time

log = logging.getLogger(__name__)


def run_agent(run_dir: str) -> None:
    """Be the agent of this node until told to leave.

    submitit has pickled a reference to this function, nothing else: the run is read from the
    frozen configuration in the run directory.
    """
    # submitit ignores SIGTERM in its tasks; an agent must obey it from here on.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    folder = Path(run_dir)
    node = f"node{os.environ['SUBMITIT_LOCAL_GLOBALID']}"
    own = folder / "nodes" / node
    own.mkdir(parents=True, exist_ok=True)
    _write_to(own / "agent.log")
    with (own / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("%s already has an agent; leaving", node)
            return
        _announce(own)
        config = thaw(folder / "run.json")
        asyncio.run(_serve(config, node, own))


async def _serve(config: RunConfig, node: str, own: Path) -> None:
    node_dir = config.memory_root / node
    agent = Agent(config, node, node_dir, "127.0.0.1")
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, agent.shut_down)
    for signum in (signal.SIGUSR2, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    for folder in (node_dir.parent, node_dir):  # `parents=True` would not give them the mode
        folder.mkdir(exist_ok=True, mode=0o700)
    await agent.run()
    # Here and not behind the loop: that one gives SIGTERM, which the launcher may send by now, its
    # default action back.
    with contextlib.suppress(OSError):  # the last agent of a machine takes the folder along
        node_dir.parent.rmdir()
    (own / "agent.json").unlink(missing_ok=True)


def _announce(own: Path) -> None:
    value = {"pid": os.getpid(), "started": start_time(os.getpid())}
    temporary = own / ".agent.json.new"
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(own / "agent.json")


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
