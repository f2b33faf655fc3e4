"""The node's uploader process: started, listened to, started again when it dies."""

import asyncio
import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.agent.lifeline import start_as_uploader
from orchestrator.core.events import ShardUploaded, UploadFailed
from orchestrator.core.saves import ShardCost

log = logging.getLogger(__name__)

RESTART_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
ALIVE = {"event": "alive"}
SILENCE_S = 60.0  # it says that it is alive every few seconds
STOP_GRACE_S = 15.0
REAP_S = 1.0
MOST_CODES, LONGEST_CODE = 16, 40


class Uploads:
    """Owns the uploader; its reports become facts.

    Attributes:
        grace_s: How long it may go on sending when it is told to end.
    """

    def __init__(
        self,
        node_dir: Path,
        store_json: str,
        run: str,
        fact: Callable[[ShardUploaded | UploadFailed], None],
    ) -> None:
        self._command = [
            sys.executable,
            "-m",
            "checkpointing.uploader",
            *("--dir", str(node_dir)),
            *("--store", store_json),
            *("--run", run),
            "--until-eof",
        ]
        self.grace_s = STOP_GRACE_S
        self._fact = fact
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep one uploader running until cancelled; then let it finish what it is sending."""
        wait_s = RESTART_WAIT_S
        try:
            while True:
                started = time.monotonic()
                try:
                    await self._run_once()
                except OSError as error:  # no process left to have, say: the ranks go on
                    log.warning("uploader cannot be started: %s", error)
                if time.monotonic() - started > LONGEST_WAIT_S:
                    wait_s = RESTART_WAIT_S
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        finally:
            await self._stop()

    async def _run_once(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,  # its end is the word to leave
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=start_as_uploader,
        )
        assert self._process.stdout is not None
        await self._listen(self._process.stdout)
        code = await self._process.wait()
        log.warning("uploader exited with %s; starting it again", code)

    async def _listen(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    line = await output.readline()
                if not line:
                    return
                if (value := json.loads(line)) != ALIVE:
                    self._fact(report_of(value))
            except TimeoutError:
                assert self._process is not None
                log.warning("uploader has said nothing for %.0f s; killing it", SILENCE_S)
                self._process.kill()
                return
            except (ValueError, KeyError, TypeError) as error:  # also a line that is too long
                log.warning("uploader said something unknown: %s", error)

    async def _stop(self) -> None:
        """Let it finish what it is sending, and hear what it says until its end."""
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


def report_of(value: dict[str, object]) -> ShardUploaded | UploadFailed:
    """Turn one report line into an event; raises KeyError or TypeError for anything else."""

    def number(name: str) -> int:
        item = value[name]
        if not isinstance(item, int):
            raise TypeError(f"{name} is no integer")
        return item

    ids = {"attempt": number("attempt"), "step": number("step"), "rank": number("rank")}
    if value["event"] == "upload_failed":
        return UploadFailed(**ids, error=str(value["error"])[:500])
    if value["event"] != "uploaded":
        raise KeyError(str(value["event"]))
    return ShardUploaded(
        **ids,
        world=number("world"),
        index_key=str(value["index_key"]),
        index_crc64=number("index_crc64"),
        nbytes=number("nbytes"),
        # From the step boundary on: what a fault meanwhile would cost, not the transfer alone.
        upload_s=_seconds(value, "upload_s"),
        cost=_cost_of(value),
    )


def _cost_of(value: Mapping[str, object]) -> ShardCost:
    retries = value.get("retries") or {}
    if not isinstance(retries, dict):
        raise TypeError("retries is no object")
    counts = list(retries.items())[:MOST_CODES]
    return ShardCost(
        sent_nbytes=_count(value.get("sent_nbytes", 0), "sent_nbytes"),
        sent_s=_seconds(value, "sent_s"),
        retries={str(code)[:LONGEST_CODE]: _count(n, "retries") for code, n in counts},
        hedges=_count(value.get("hedges", 0), "hedges"),
        plane=str(value.get("plane", ""))[:LONGEST_CODE],
    )


def _seconds(value: Mapping[str, object], name: str) -> float:
    """Return seconds, nan where the uploader does not know them."""
    item = value.get(name)
    if item is None:
        return math.nan
    if isinstance(item, bool) or not isinstance(item, int | float) or not 0 <= item < math.inf:
        raise TypeError(f"{name} is no number of seconds")
    return float(item)


def _count(item: object, name: str) -> int:
    if type(item) is not int or item < 0:
        raise TypeError(f"{name} is no count")
    return item
