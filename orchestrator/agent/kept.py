"""A process that a node has beside its ranks: started, listened to, started again when it dies."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from orchestrator.agent.lifeline import start_as_companion

log = logging.getLogger(__name__)

RESTART_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
ALIVE = {"event": "alive"}
SILENCE_S = 60.0  # it says that it is alive every few seconds
STOP_GRACE_S = 15.0
REAP_S = 1.0
LONGEST_LINE = 4 << 20


class KeptProcess:
    """Owns one process that says what it does in JSON lines.

    Attributes:
        grace_s: How long it may go on when it is told to end.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.grace_s = STOP_GRACE_S
        self._name = name
        self._command = list(command)
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep one running until cancelled; then let it finish what it is doing."""
        wait_s = RESTART_WAIT_S
        try:
            while True:
                started = time.monotonic()
                try:
                    await self._run_once()
                except OSError as error:  # no process left to have, say: the ranks go on
                    log.warning("%s cannot be started: %s", self._name, error)
                if time.monotonic() - started > LONGEST_WAIT_S:
                    wait_s = RESTART_WAIT_S
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        finally:
            await self._stop()

    def heard(self, value: Any) -> None:
        """Take in one line; ValueError, KeyError and TypeError mean that it is none of its own."""
        raise NotImplementedError

    def started(self) -> None:
        """Say what a new process has to know, if anything."""

    def ended(self) -> None:
        """Note that it died by itself, if that matters."""

    def say(self, line: str) -> None:
        """Tell the running process something; one that is gone does not hear it."""
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            return
        with contextlib.suppress(OSError, RuntimeError):
            process.stdin.write(line.encode() + b"\n")

    async def _run_once(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,  # its end is the word to leave
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=start_as_companion,
            limit=LONGEST_LINE,
        )
        assert self._process.stdout is not None
        self.started()
        await self._listen(self._process.stdout)
        code = await self._process.wait()
        log.warning("%s exited with %s; starting it again", self._name, code)
        self.ended()

    async def _listen(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    line = await output.readline()
                if not line:
                    return
                if (value := json.loads(line)) != ALIVE:
                    self.heard(value)
            except TimeoutError:
                assert self._process is not None
                log.warning("%s has said nothing for %.0f s; killing it", self._name, SILENCE_S)
                self._process.kill()
                return
            except (ValueError, KeyError, TypeError) as error:  # also a line that is too long
                log.warning("%s said something unknown: %s", self._name, error)

    async def _stop(self) -> None:
        """Let it finish what it is doing, and hear what it says until its end."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(self.grace_s):
                await self._listen(process.stdout)
                await process.wait()
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):  # stuck in the kernel, it goes when it can
                await asyncio.wait_for(process.wait(), REAP_S)
            if not isinstance(error, TimeoutError):
                raise
