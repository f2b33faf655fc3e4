"""The supervisor's side of the agents' connections: who is there, orders out, outcomes back."""

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import WSMsgType, web

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


@dataclass(slots=True)
class Session:
    """One connected agent."""

    hello: Hello
    socket: web.WebSocketResponse
    waiting: dict[str, "asyncio.Future[Outcome | None]"] = field(default_factory=dict)

    def give_up(self) -> None:
        """Tell everybody who waits for an outcome that none will come this way."""
        for future in self.waiting.values():
            if not future.done():
                future.set_result(None)


class Sessions:
    """All connected agents. What they say goes to the callbacks of the loop."""

    def __init__(
        self,
        token: str,
        greet: Callable[[Hello], Welcome],
        facts: Callable[[Hello, Fact], None],
        reports: Callable[[Hello, Report], None],
        gone: Callable[[Hello], None],
    ) -> None:
        self._token = token
        self._greet = greet
        self._facts = facts
        self._reports = reports
        self._gone = gone
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
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await socket.receive_str()
            hello = unpack_from_agent(first)
            if not isinstance(hello, Hello):
                return socket
            session = Session(hello, socket)
            await self._admit(session)
            async for frame in socket:
                if frame.type is WSMsgType.TEXT:
                    self._receive(session, frame.data)
        except (TimeoutError, TypeError, CodecError, ConnectionError) as error:
            log.warning("an agent at %s left or said something unknown: %s", request.remote, error)
        finally:
            if session is not None:
                self._remove(session)
            with contextlib.suppress(Exception):
                await socket.close()
        return socket

    async def close(self) -> None:
        """Say goodbye to all agents; they look for the next supervisor."""
        goodbyes = [session.socket.close() for session in self._sessions.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*goodbyes, return_exceptions=True)

    async def _admit(self, session: Session) -> None:
        await session.socket.send_str(pack(self._greet(session.hello)))
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

    async def ack(self, node: str, incarnation: str, n: int) -> None:
        """Tell an agent that its facts up to `n` are on disk; lost is harmless."""
        session = self._sessions.get(node)
        if session is not None and session.hello.incarnation == incarnation:
            with contextlib.suppress(ConnectionError):
                await session.socket.send_str(pack(Ack(n=n)))

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
                    outcome = await self._ask(session, Order(key=key, epoch=epoch, body=body))
                    if outcome is not None:
                        return outcome
                    await asyncio.sleep(RECONNECT_S)
        except TimeoutError:
            return Outcome(key=key, ok=False, detail=f"{node} did not answer in {timeout_s:g} s")

    async def _ask(self, session: Session, order: Order) -> Outcome | None:
        """Send an order and wait; None when the connection ended before the outcome."""
        future: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        session.waiting[order.key] = future
        try:
            await session.socket.send_str(pack(order))
            return await future
        except ConnectionError:
            return None
        finally:
            session.waiting.pop(order.key, None)

    async def _session(self, node: str) -> Session:
        async with self._changed:
            await self._changed.wait_for(lambda: node in self._sessions)
            return self._sessions[node]

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
