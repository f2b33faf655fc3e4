"""What a run leaves behind on this machine: processes and memory."""

import time
from contextlib import suppress
from pathlib import Path

from orchestrator.config import RunConfig
from orchestrator.process_id import start_time

PATIENCE_S = 30.0


def processes_of(config: RunConfig) -> dict[int, str]:
    """Return the living processes that name the run's folders in command line or environment."""
    marks = [str(config.run_dir).encode(), str(memory_of(config)).encode()]
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            text = command + (folder / "environ").read_bytes()
            if any(mark in text for mark in marks) and start_time(int(folder.name)) is not None:
                found[int(folder.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def memory_of(config: RunConfig) -> Path:
    """Return the folder of the run's nodes in this machine's memory."""
    return config.memory_root


def traces(config: RunConfig) -> list[str]:
    """Say what is left of a run, after giving it time to leave: an empty list is good."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        left = [f"{pid}: {command}" for pid, command in processes_of(config).items()]
        if memory_of(config).exists():
            left.append(str(memory_of(config)))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
