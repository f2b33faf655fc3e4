"""One rank as a process group: started to die with the agent, stopped by group, reaped."""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: the child only calls it


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends.

    A SIGKILLed agent runs no clean-up; without this its ranks would train on, unwatched.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class RankProcess:
    """A running rank and its descendants.

    Attributes:
        output: What it prints, standard output and error together.
        told_to_stop: Whether `stop` was called before it ended.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        pipe: asyncio.BaseTransport,
    ) -> None:
        self._process = process
        self._pipe = pipe
        self.output = output
        self.told_to_stop = False

    @classmethod
    async def start(
        cls, argv: tuple[str, ...], env: Mapping[str, str], workdir: Path
    ) -> "RankProcess":
        """Start a command in a session of its own, its output in one pipe.

        Raises:
            OSError: The command or the working directory does not exist.
        """
        # Our own pipe: asyncio's would hold back the exit until every heir has closed it
        # (https://github.com/python/cpython/issues/119710).
        ours, theirs = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                env=dict(env),
                cwd=workdir,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        output = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb", buffering=0)
        )
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
            os.killpg(self.pid, signum)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL for what is left after `grace_s`; returns when it is reaped."""
        self.told_to_stop = True
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)  # a stopped process acts on SIGTERM only when it goes on
        try:
            await asyncio.wait_for(asyncio.shield(self.wait()), grace_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.wait()
        self.signal(signal.SIGKILL)  # children that outlived their leader
