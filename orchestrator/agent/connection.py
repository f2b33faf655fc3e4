"""The agent's line to the supervisor: found through the run directory, kept, taken up again.

Facts wait in an outbox until the supervisor has them on disk; after a lost connection, or a
supervisor that was killed and started again, they are sent once more. Their numbers let the
supervisor count each of them once.
"""

import asyncio
import collections
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from orchestrator.core.codec import CodecError
from orchestrator.wire import (
    MAX_FRAME_BYTES,
    Ack,
    Fact,
    FactEvent,
    FromAgent,
    Hello,
    Order,
    Outcome,
    Report,
    Welcome,
    pack,
    unpack_from_supervisor,
)

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
RETRY_S = (0.1, 0.2, 0.5, 1.0)
PING_S = 5.0
CLOSE_S = 0.5


class Connection:
    """Connects for ever; calls back with orders."""

    def __init__(
        self,
        run_dir: Path,
        hello: Callable[[], Hello],
        welcomed: Callable[[Welcome], Awaitable[None]],
        ordered: Callable[[Order], Awaitable[Outcome]],
    ) -> None:
        self._run_dir = run_dir
        self._hello = hello
        self._welcomed = welcomed
        self._ordered = ordered
        self._outbox: collections.deque[Fact] = collections.deque()
        self._next = 1
        self._sent = 0
        self._wake = asyncio.Event()
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._tasks: set[asyncio.Future[object]] = set()
        self._parted = time.monotonic()
        self._settled = asyncio.Event()

    @property
    def alone_s(self) -> float:
        """For how long no supervisor has been there, 0 while one is.

        A living one may have nothing to say for days: the pings of the connection tell.
        """
        return 0.0 if self._socket is not None else time.monotonic() - self._parted

    @property
    def unsent(self) -> int:
        """Facts that the supervisor has not yet confirmed."""
        return len(self._outbox)

    def fact(self, event: FactEvent) -> None:
        """Keep a fact until the supervisor has it on disk; facts arrive in this order."""
        self._outbox.append(Fact(n=self._next, event=event))
        self._next += 1
        self._wake.set()
        self._note()

    def report(self, report: Report) -> None:
        """Send a report if connected; reports are not kept."""
        self._spawn(self._send(report))

    async def settle(self, timeout_s: float) -> None:
        """Wait until the supervisor has all facts on disk, or is not there; at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()

    async def introduce_again(self) -> None:
        """Close the connection; the next one begins with a fresh hello."""
        if self._socket is not None:
            await self._socket.close()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        self._spawn(self._pump())
        tries = 0
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    await self._one_connection(session)
                    tries = 0
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                    log.debug("no connection to the supervisor: %s", error)
                    tries += 1
                await asyncio.sleep(_wait_s(tries))

    async def _one_connection(self, session: aiohttp.ClientSession) -> None:
        url, token = self._whereabouts()
        # Not wait_for: before Python 3.12 it loses a cancellation that comes with the result.
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            socket = await session.ws_connect(
                f"{url}/agents",
                headers={"Authorization": f"Bearer {token}"},
                heartbeat=PING_S,
                max_msg_size=MAX_FRAME_BYTES,
            )
        try:
            await socket.send_str(pack(self._hello()))
            async for frame in socket:
                if frame.type is not aiohttp.WSMsgType.TEXT:
                    break
                await self._receive(socket, frame.data)
        finally:
            if self._socket is not None:
                self._socket, self._parted = None, time.monotonic()
                self._note()
                log.warning("no supervisor; the ranks go on")
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_S):  # a frozen supervisor does not say goodbye
                    await socket.close()

    def _whereabouts(self) -> tuple[str, str]:
        """Return the supervisor's address and the token; raises OSError or ValueError."""
        where = json.loads((self._run_dir / "supervisor.json").read_text(encoding="utf-8"))
        if not (isinstance(where, dict) and isinstance(where.get("url"), str)):
            raise ValueError("supervisor.json names no address")
        return where["url"], (self._run_dir / "token").read_text(encoding="utf-8").strip()

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse, text: str) -> None:
        try:
            message = unpack_from_supervisor(text)
        except CodecError as error:
            log.warning("the supervisor sent something unknown: %s", error)
            return
        match message:
            case Welcome():
                log.info("the supervisor of epoch %d is there", message.epoch)
                self._drop(message.acked)
                self._socket, self._sent = socket, message.acked
                self._wake.set()
                self._note()
                self._spawn(self._welcomed(message))
            case Ack(n=n):
                self._drop(n)
            case Order():
                self._spawn(self._carry_out(message))

    async def _carry_out(self, order: Order) -> None:
        await self._send(await self._ordered(order))

    async def _pump(self) -> None:
        """Send facts one after the other: the supervisor counts them by number."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for fact in tuple(self._outbox):
                if fact.n <= self._sent:
                    continue
                if not await self._send(fact):
                    break  # a later one on the next connection would make this one look repeated
                self._sent = fact.n

    def _drop(self, n: int) -> None:
        while self._outbox and self._outbox[0].n <= n:
            self._outbox.popleft()
        self._note()

    def _note(self) -> None:
        if self._outbox and self._socket is not None:
            self._settled.clear()
        else:
            self._settled.set()

    async def _send(self, message: FromAgent) -> bool:
        socket = self._socket
        if socket is None or socket.closed:
            return False
        try:
            await socket.send_str(pack(message))
        except (ConnectionError, aiohttp.ClientError):
            return False
        return self._socket is socket

    def _spawn(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _wait_s(tries: int) -> float:
    """Return the wait before the next try; the agents of a fleet do not all come at once."""
    longest = RETRY_S[min(tries, len(RETRY_S) - 1)]
    return longest * (0.5 + secrets.randbelow(1000) / 2000)
