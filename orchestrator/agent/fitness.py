"""Whether ranks can run on this node at all, found out before they are sent there.

A spare that cannot work is found while it is idle, and not at night when it has to take over.
What cannot be told, as for GPUs without a driver to ask, speaks neither for nor against a node.
"""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence

from monitors.gpu.readings import GpuReading
from monitors.observations import Ok
from orchestrator.config import RunConfig

LEAST_FREE_BYTES = 64 * 1024 * 1024
LOOK_EVERY_S = 15.0
LOOK_TIMEOUT_S = 10.0


class Fitness:
    """Looks at this node; `read_gpus` asks NVML."""

    def __init__(
        self, config: RunConfig, read_gpus: Callable[[], Awaitable[Sequence[GpuReading]]]
    ) -> None:
        self._config = config
        self._read_gpus = read_gpus
        self._looking: asyncio.Future[str] | None = None

    async def look(self) -> str:
        """Return what `problem` finds, or that even looking takes too long.

        A look that hangs (a dead file system) is not begun a second time before it ends.
        """
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        done, _ = await asyncio.wait([self._looking], timeout=LOOK_TIMEOUT_S)
        if not done:
            return f"looking at the node takes longer than {LOOK_TIMEOUT_S:g} s"
        found, self._looking = self._looking, None
        return found.result()

    async def _look(self) -> str:
        gpus = await self._read_gpus()
        return await asyncio.to_thread(problem, self._config, gpus)


def problem(config: RunConfig, gpus: Sequence[GpuReading]) -> str:
    """Say in one line why no rank can run here, "" when nothing speaks against it.

    Args:
        config: The run.
        gpus: What NVML says of this node's GPUs; empty when there is no driver.
    """
    workdir = config.job.workdir
    if not workdir.is_dir():
        return f"no directory {workdir} (job.workdir); is its file system mounted here?"
    return _memory(config) or _gpus(config.nodes.gpus_per_node, gpus)


def _memory(config: RunConfig) -> str:
    memory = config.nodes.memory_dir
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        return f"{memory} (nodes.memory_dir) is no writable directory"
    try:
        free = shutil.disk_usage(memory).free
    except OSError as error:
        return f"{memory} (nodes.memory_dir) cannot be looked at: {error.strerror}"
    if free < LEAST_FREE_BYTES:
        least = LEAST_FREE_BYTES >> 20
        return f"only {free >> 20} MiB free in {memory} (nodes.memory_dir), {least} needed"
    return ""


def _gpus(wanted: int, gpus: Sequence[GpuReading]) -> str:
    if not wanted or not gpus:
        return ""
    answering = sum(isinstance(gpu.memory_total_bytes, Ok) for gpu in gpus)
    if answering >= wanted:
        return ""
    return f"{answering} of {wanted} GPUs answer (nodes.gpus_per_node)"
