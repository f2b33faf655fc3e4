"""One rank as a process group: started to die with the agent, stopped by group, reaped."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from orchestrator.agent.lifeline import start_as_rank
from orchestrator.agent.zygote import ForkedProcess, Zygote, ZygoteUnavailable, can_fork

log = logging.getLogger(__name__)

Process = asyncio.subprocess.Process | ForkedProcess


class RankProcess:
    """A running rank and its descendants.

    Attributes:
        output: What it prints, standard output and error together.
        told_to_stop: Whether `stop` was called before it ended.
    """

    def __init__(
        self,
        process: Process,
        output: asyncio.StreamReader,
        pipe: asyncio.BaseTransport,
    ) -> None:
        self._process = process
        self._pipe = pipe
        self.output = output
        self.told_to_stop = False

    @classmethod
    async def start(
        cls,
        argv: tuple[str, ...],
        env: Mapping[str, str],
        workdir: Path,
        zygote: Zygote | None = None,
    ) -> "RankProcess":
        """Start a command in a session of its own, its output in one pipe.

        Raises:
            OSError: The command or the working directory does not exist.
        """
        # Our own pipe: asyncio's would hold back the exit until every heir has closed it
        # (https://github.com/python/cpython/issues/119710).
        ours, theirs = os.pipe()
        try:
            process = await _spawn(argv, env, workdir, theirs, zygote)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        output = asyncio.StreamReader()
        try:
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb", buffering=0)
            )
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        return cls(process, output, pipe)

    @property
    def pid(self) -> int:
        """Process id, also the id of its group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not been reaped yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Reap it; return its exit code, or minus the signal's number."""
        return await self._process.wait()

    def close(self) -> None:
        """End what is left of its group, and read no more; for a rank that has been reaped."""
        self.signal(signal.SIGKILL)
        self._pipe.close()

    def signal(self, signum: int) -> None:
        """Send a signal to the whole group; a group that is gone is no error."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.pid, signum)
            except ProcessLookupError:
                if not self.is_running:
                    raise
                os.kill(self.pid, signum)  # just forked, and not yet in a session of its own

    async def stop(self, grace_s: float, deaf: int = 0) -> None:
        """SIGTERM, and SIGKILL for what is left after `grace_s`; returns when it is reaped.

        Args:
            grace_s: Time to end.
            deaf: Process of the group that needs SIGKILL at once, 0 for none.
        """
        self.told_to_stop = True
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process acts on SIGTERM only when it goes on
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if deaf and os.getpgid(deaf) == self.pid:
                os.kill(deaf, signal.SIGKILL)
        try:
            await asyncio.wait_for(asyncio.shield(self.wait()), grace_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.wait()
        self.signal(signal.SIGKILL)  # children that outlived their leader


async def _spawn(
    argv: tuple[str, ...],
    env: Mapping[str, str],
    workdir: Path,
    output: int,
    zygote: Zygote | None,
) -> Process:
    """Fork from the zygote where that is possible, else start a program of its own."""
    if zygote is not None and can_fork(argv):
        try:
            return await zygote.fork(argv, env, workdir, output)
        except ZygoteUnavailable as error:
            log.warning("cold start, the zygote is not usable: %s", error)
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(env),
        cwd=workdir,
        start_new_session=True,
        preexec_fn=start_as_rank,
    )
