"""The agent's side of the zygote: started early, asked for ranks, replaced when it dies."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.agent.lifeline import start_as_zygote

log = logging.getLogger(__name__)

READY_TIMEOUT_S = 120.0
WARM_WAIT_S = 30.0
FORK_TIMEOUT_S = 10.0
UNKNOWN_EXIT = 255


class ZygoteUnavailable(Exception):
    """No rank can be forked now; start it as a process of its own instead."""


def can_fork(argv: Sequence[str]) -> bool:
    """Whether a command is `python SCRIPT` or `python -m MODULE` with this very interpreter."""
    if len(argv) < 2 or Path(argv[0]).resolve() != Path(sys.executable).resolve():
        return False
    return argv[1].endswith(".py") or (argv[1] == "-m" and len(argv) > 2)


class ForkedProcess:
    """A rank that the zygote forked; this process is its parent and reaps it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._handle = os.pidfd_open(pid)
        self._loop.add_reader(self._handle, self._reap)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        try:
            ended = os.waitid(os.P_PIDFD, self._handle, os.WEXITED)
        except ChildProcessError:  # somebody else reaped it; that it ended is all that is known
            ended = None
        os.close(self._handle)
        if ended is None:
            self.returncode = UNKNOWN_EXIT
        else:
            exited = ended.si_code == os.CLD_EXITED
            self.returncode = ended.si_status if exited else -ended.si_status
        self._exited.set_result(self.returncode)

    async def wait(self) -> int:
        """Return its exit code, or minus the signal's number."""
        return await asyncio.shield(self._exited)


class Zygote:
    """One warm process; `fork` gives pids of ranks whose parent is the agent."""

    def __init__(self, preload: Sequence[str], env: Mapping[str, str]) -> None:
        self._preload = tuple(preload)
        self._env = dict(env)
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._ready: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._was_ready = False

    def warm_up(self) -> None:
        """Start the process, unless it runs; returns at once."""
        if self._process is not None and self._process.returncode is None:
            return
        if self._ready is None or self._ready.done():
            self._ready = asyncio.ensure_future(self._start())
            self._ready.add_done_callback(_tell)

    def revive(self) -> None:
        """Start it again when it was warm and somebody killed it; one that never was is left."""
        if self._was_ready:
            self.warm_up()

    async def _start(self) -> None:
        self._was_ready = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._drop_channel()
        self._channel = ours  # from here on `close` closes it
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                # -P: the ranks put their own folder in front of the path, not this one's.
                *("-P", "-m", "orchestrator.agent.forkserver", str(theirs.fileno())),
                *self._preload,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=self._env,
                start_new_session=True,
                preexec_fn=start_as_zygote,
            )
        finally:
            theirs.close()
        answer = await self._receive(READY_TIMEOUT_S)
        if answer.get("threads") != 1:
            raise ZygoteUnavailable(f"not safe to fork: {answer}")
        self._was_ready = True

    async def fork(
        self, argv: Sequence[str], env: Mapping[str, str], workdir: Path, output: int
    ) -> ForkedProcess:
        """Fork one rank that writes to the descriptor `output`.

        Raises:
            ZygoteUnavailable: The zygote is not there, not safe, or did not answer in time.
        """
        async with self._lock:
            self.warm_up()
            await self._until_ready()
            request = {
                "argv": list(argv[1:]),
                "env": dict(env),
                "cwd": str(workdir),
                "parent": os.getpid(),
            }
            try:
                assert self._channel is not None
                socket.send_fds(self._channel, [json.dumps(request).encode()], [output])
                answer = await self._receive(FORK_TIMEOUT_S)
            except (OSError, TimeoutError, ValueError) as error:
                if isinstance(error, OSError) and error.errno == errno.EMSGSIZE:
                    raise ZygoteUnavailable("the rank's environment is too large") from error
                await self.close()
                raise ZygoteUnavailable(f"it died or hangs: {error}") from error
        pid = answer.get("pid")
        if not isinstance(pid, int):
            raise ZygoteUnavailable(str(answer.get("error", answer)))
        return ForkedProcess(pid)

    async def _until_ready(self) -> None:
        assert self._ready is not None
        try:
            async with asyncio.timeout(WARM_WAIT_S):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            raise ZygoteUnavailable("still importing") from error
        except (OSError, ValueError) as error:
            raise ZygoteUnavailable(str(error)) from error

    async def _receive(self, timeout_s: float) -> dict[str, object]:
        assert self._channel is not None
        async with asyncio.timeout(timeout_s):
            data = await asyncio.get_running_loop().sock_recv(self._channel, 65_536)
        if not data:
            raise ConnectionError("the zygote is gone")
        answer: object = json.loads(data)
        if not isinstance(answer, dict):
            raise ValueError(f"the zygote said {data!r}")
        return answer

    async def close(self) -> None:
        """End the process; ranks that it forked go on."""
        if self._ready is not None:
            self._ready.cancel()
            self._ready = None
        self._drop_channel()
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _tell(ready: "asyncio.Future[None]") -> None:
    if not ready.cancelled() and (error := ready.exception()) is not None:
        log.warning("no zygote, ranks start cold: %s", error)
