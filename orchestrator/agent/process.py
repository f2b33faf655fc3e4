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
    """A running rank and its descendants."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.told_to_stop = False

    @classmethod
    async def start(
        cls, argv: tuple[str, ...], env: Mapping[str, str], workdir: Path
    ) -> "RankProcess":
        """Start a command in a session of its own, its output in one pipe.

        Raises:
            OSError: The command or the working directory does not exist.
        """
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(env),
            cwd=workdir,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id, also the id of its group."""
        return self._process.pid

    @property
    def output(self) -> asyncio.StreamReader:
        """What it prints, standard output and error together."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def is_running(self) -> bool:
        """Whether it has not been reaped yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Reap it; return its exit code, or minus the signal's number."""
        return await self._process.wait()

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
