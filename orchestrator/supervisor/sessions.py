"""The supervisor's side of the agents' connections: who is there, orders out, outcomes back."""

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import WSCloseCode, WSMsgType, web

from orchestrator.core.codec import CodecError
from orchestrator.wire import (
    MAX_FRAME_BYTES,
    Ack,
    Fact,
    Hello,
    Order,
    OrderBody,
    Outcome,
    Report,
    Welcome,
    pack,
    unpack_from_agent,
)

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
PING_S = 5.0
RECONNECT_S = 0.05
CLOSE_S = 1.0
SEND_S = 10.0
NOT_WELCOMED = Welcome(epoch=0, acked=0, attempt=0)


@dataclass(slots=True)
class Session:
    """One connected agent. What is said to it waits here: its window may be full for ever.

    Attributes:
        welcome: What it was told; no attempt before that.
        since: When it was welcomed, on the monotonic clock.
    """

    hello: Hello
    socket: web.WebSocketResponse
    transport: asyncio.Transport | None = None
    welcome: Welcome = NOT_WELCOMED
    since: float = 0.0
    waiting: dict[str, "asyncio.Future[Outcome | None]"] = field(default_factory=dict)
    _acked: int = 0
    _orders: dict[str, str] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def give_up(self) -> None:
        """Tell everybody who waits for an outcome that none will come this way."""
        for future in self.waiting.values():
            if not future.done():
                future.set_result(None)

    def cut(self) -> None:
        """End the connection at once, whatever is on its way; a living agent comes again."""
        if self.transport is not None:
            self.transport.abort()

    def ack(self, n: int) -> None:
        """Have an ack sent; only the latest counts, and a lost one is harmless."""
        self._acked = max(self._acked, n)
        self._news.set()

    async def ask(self, order: Order) -> Outcome | None:
        """Have an order sent and wait; None when the connection ended before the outcome."""
        future: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self.waiting[order.key] = future
        self._orders[order.key] = pack(order)
        self._news.set()
        try:
            return await future
        finally:
            self.waiting.pop(order.key, None)
            self._orders.pop(order.key, None)

    async def send_for_ever(self) -> None:
        """Send what waits until cancelled; cut the connection when it takes nothing any more."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while text := self._next():
                    async with asyncio.timeout(SEND_S):
                        await self.socket.send_str(text)
        except (ConnectionError, TimeoutError) as error:
            log.warning("nothing can be sent to %s any more: %r", self.hello.node, error)
            self.cut()

    def _next(self) -> str:
        if self._acked:
            text = pack(Ack(n=self._acked))
            self._acked = 0
            return text
        return self._orders.pop(next(iter(self._orders))) if self._orders else ""


class Sessions:
    """All connected agents. What they say goes to the callbacks of the loop."""

    def __init__(
        self,
        token: str,
        greet: Callable[[Hello], Welcome],
        facts: Callable[[Hello, Fact], None],
        reports: Callable[[Hello, Report], None],
        gone: Callable[[Hello], None],
        is_former: Callable[[Hello], bool] = lambda _: False,
    ) -> None:
        self._token = token
        self._greet = greet
        self._facts = facts
        self._reports = reports
        self._gone = gone
        self._is_former = is_former
        self._sessions: dict[str, Session] = {}
        self._changed = asyncio.Condition()
        self._left = asyncio.Event()

    def is_allowed(self, request: web.Request) -> bool:
        """Compare the request's bearer token in constant time."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Handle one agent's connection until it ends."""
        if not self.is_allowed(request):
            log.warning("an agent at %s showed a wrong token", request.remote)
            return web.json_response({"error": "wrong token"}, status=401)
        socket = web.WebSocketResponse(heartbeat=PING_S, max_msg_size=MAX_FRAME_BYTES)
        await socket.prepare(request)
        session: Session | None = None
        sender: asyncio.Future[None] | None = None
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await socket.receive_str()
            hello = unpack_from_agent(first)
            if not isinstance(hello, Hello):
                return socket
            session = Session(hello, socket, request.transport)
            await self._admit(session)
            sender = asyncio.ensure_future(session.send_for_ever())
            async for frame in socket:
                if frame.type is WSMsgType.TEXT:
                    self._receive(session, frame.data)
        except (TimeoutError, TypeError, CodecError, ConnectionError) as error:
            log.warning("an agent at %s left or said something unknown: %s", request.remote, error)
        finally:
            if sender is not None:
                sender.cancel()
            if session is not None:
                self._remove(session)
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_S):
                    await socket.close()
            if session is not None and socket.close_code == WSCloseCode.ABNORMAL_CLOSURE:
                session.cut()  # what still waits to be sent would keep it half open for minutes
        return socket

    async def close(self) -> None:
        """Say goodbye to all agents; they look for the next supervisor."""
        goodbyes = [session.socket.close() for session in self._sessions.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*goodbyes, return_exceptions=True)

    async def _admit(self, session: Session) -> None:
        is_former = self._is_former(session.hello)
        session.welcome, session.since = self._greet(session.hello), time.monotonic()
        await session.socket.send_str(pack(session.welcome))
        if is_former:
            return  # the connection belongs to the agent that took its place
        before = self._sessions.get(session.hello.node)
        async with self._changed:
            self._sessions[session.hello.node] = session
            self._changed.notify_all()
        if before is not None:  # perhaps half open: its orders are given again to the new one
            before.give_up()

    def _remove(self, session: Session) -> None:
        session.give_up()
        node = session.hello.node
        if self._sessions.get(node, session) is not session:
            return  # replaced; without any there, it was greeted and left before it was admitted
        self._sessions.pop(node, None)
        self._left.set()
        self._gone(session.hello)

    def _receive(self, session: Session, text: str) -> None:
        try:
            message = unpack_from_agent(text)
        except CodecError as error:
            log.warning("%s said something unknown: %s", session.hello.node, error)
            return
        match message:
            case Fact():
                self._facts(session.hello, message)
            case Report():
                self._reports(session.hello, message)
            case Outcome():
                future = session.waiting.pop(message.key, None)
                if future is not None and not future.done():
                    future.set_result(message)

    def ack(self, node: str, incarnation: str, n: int) -> None:
        """Tell an agent that its facts up to `n` are on disk; returns at once, lost is harmless."""
        session = self._sessions.get(node)
        if session is not None and session.hello.incarnation == incarnation:
            session.ack(n)

    async def order(
        self, node: str, key: str, epoch: int, body: OrderBody, timeout_s: float
    ) -> Outcome:
        """Give an order and wait for its outcome, over reconnections, at most `timeout_s`.

        The same key may be sent several times; the agent carries it out once.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    session = await self._session(node)
                    outcome = await session.ask(Order(key=key, epoch=epoch, body=body))
                    if outcome is not None:
                        return outcome
                    await asyncio.sleep(RECONNECT_S)
        except TimeoutError:
            return Outcome(key=key, ok=False, detail=f"{node} did not answer in {timeout_s:g} s")

    async def _session(self, node: str) -> Session:
        async with self._changed:
            await self._changed.wait_for(lambda: node in self._sessions)
            return self._sessions[node]

    def all(self) -> tuple[Session, ...]:
        """Return the sessions of all connected agents."""
        return tuple(self._sessions.values())

    def is_connected(self, node: str) -> bool:
        """Whether the node's agent is connected now."""
        return node in self._sessions

    async def all_gone(self, nodes: tuple[str, ...], timeout_s: float) -> None:
        """Wait until none of the nodes is connected, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(node in self._sessions for node in nodes):
                    self._left.clear()
                    await self._left.wait()


def read_or_make_token(path: Path) -> str:
    """Return the run's token, made on first use, readable by its owner only."""
    with contextlib.suppress(FileNotFoundError):
        if known := path.read_text(encoding="utf-8").strip():
            return known
    token = secrets.token_hex(32)
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(token)
    temporary.replace(path)  # never an empty one: that would let everybody in
    return token
