"""A loopback proxy in front of a real S3 server that breaks requests as a script says.

Plain HTTP/1.1, one upstream connection per client connection. The Host header goes through as it
is, so signatures made for the proxy's address stay valid.
"""

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

_BLOCK = 64 << 10
_HEAD = 64 << 10


class Broken(Exception):
    """The client's connection ends here, by the script."""


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    raw_head: bytes
    client: asyncio.StreamWriter
    body: "Stream"

    @property
    def operation(self) -> str:
        """The S3 name of what is asked."""
        if "uploadId" in self.query:
            part = "UploadPart" if "partNumber" in self.query else ""
            by_method = {
                "PUT": part,
                "POST": "CompleteMultipartUpload",
                "DELETE": "AbortMultipartUpload",
                "GET": "ListParts",
            }
            return by_method.get(self.method, "")
        if "uploads" in self.query:
            return "CreateMultipartUpload" if self.method == "POST" else "ListMultipartUploads"
        if "list-type" in self.query:
            return "ListObjectsV2"
        return {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject"}.get(
            self.method, "DeleteObject" if self.method == "DELETE" else ""
        )


@dataclass
class Stream:
    """A body on its way: how many bytes are still to come, and from where."""

    reader: asyncio.StreamReader
    left: int
    rate: float = 0.0
    cut_after: int | None = None
    flip_at: int | None = None

    async def blocks(self) -> AsyncIterator[bytes]:
        at = 0
        while self.left:
            room = self.left if self.cut_after is None else min(self.left, self.cut_after - at)
            if room <= 0:
                raise Broken
            block = await self.reader.read(min(_BLOCK, room))
            if not block:
                raise Broken
            if self.flip_at is not None and at <= self.flip_at < at + len(block):
                changed = bytearray(block)
                changed[self.flip_at - at] ^= 1
                block = bytes(changed)
            self.left -= len(block)
            at += len(block)
            if self.rate:
                await asyncio.sleep(len(block) / self.rate)
            yield block

    async def drain(self) -> None:
        async for _ in self.blocks():
            pass


@dataclass
class Answer:
    """What the server said, its body still on the way."""

    status: int
    head: bytes
    body: Stream
    chunked: bool


Forward = Callable[[], Awaitable[Answer]]


class Fault:
    """Lets everything through; subclasses change one step."""

    async def before(self, request: Request) -> None:
        """Called before anything is sent to the server; raise `Broken` to hang up."""

    async def answer(self, request: Request, forward: Forward) -> Answer | bytes | None:
        """Return the server's answer, other bytes in its place, or None to hang up."""
        return await forward()


@dataclass
class Delay(Fault):
    seconds: float

    async def before(self, request: Request) -> None:
        await asyncio.sleep(self.seconds)


@dataclass
class Say(Fault):
    """Answers in the server's place, after having read the body."""

    status: int
    code: str
    clock_off_s: float = 0.0

    async def answer(self, request: Request, forward: Forward) -> bytes:
        await request.body.drain()
        text = (
            f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>so says the proxy"
            f"</Message><RequestId>PROXY1</RequestId></Error>"
        ).encode()
        body = b"" if request.method == "HEAD" else text
        date = formatdate(time.time() + self.clock_off_s, usegmt=True)
        return (
            f"HTTP/1.1 {self.status} So\r\nContent-Type: application/xml\r\nDate: {date}\r\n"
            f"x-amz-request-id: PROXY1\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body


def slow_down() -> Fault:
    return Say(503, "SlowDown")


def internal_error() -> Fault:
    return Say(500, "InternalError")


def expired_token() -> Fault:
    return Say(400, "ExpiredToken")


def skewed_clock(seconds: float) -> Fault:
    """The server's clock shows this much more than ours."""
    return Say(403, "RequestTimeTooSkewed", clock_off_s=seconds)


@dataclass
class Reset(Fault):
    """Hangs up when so many bytes of the request's body have passed."""

    after: int = 0

    async def before(self, request: Request) -> None:
        if self.after == 0:
            raise Broken
        request.body.cut_after = self.after


@dataclass
class LoseAnswer(Fault):
    """The server does it, and nobody hears."""

    async def answer(self, request: Request, forward: Forward) -> None:
        answer = await forward()
        await answer.body.drain()


@dataclass
class TakeAll(Fault):
    """Says yes where the server refused a conditional put, as stores do that ignore conditions."""

    async def answer(self, request: Request, forward: Forward) -> Answer | bytes:
        answer = await forward()
        if answer.status != 412:
            return answer
        await answer.body.drain()
        return b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n'


@dataclass
class Truncate(Fault):
    """The answer's body ends early."""

    after: int

    async def answer(self, request: Request, forward: Forward) -> Answer:
        answer = await forward()
        answer.body.cut_after = self.after
        return answer


@dataclass
class Flip(Fault):
    """One bit of the answer's body, or of the request's, is another one."""

    at: int
    of_request: bool = False

    async def before(self, request: Request) -> None:
        if self.of_request:
            request.body.flip_at = self.at

    async def answer(self, request: Request, forward: Forward) -> Answer:
        answer = await forward()
        if not self.of_request:
            answer.body.flip_at = self.at
        return answer


@dataclass
class Throttle(Fault):
    """Both bodies flow with so many bytes a second, each connection for itself."""

    bytes_per_s: float

    async def before(self, request: Request) -> None:
        request.body.rate = self.bytes_per_s

    async def answer(self, request: Request, forward: Forward) -> Answer:
        answer = await forward()
        answer.body.rate = self.bytes_per_s
        return answer


@dataclass
class Hold(Fault):
    """Stops a request before or after the server does it, and says so; then hangs up on release."""

    after_server: bool = False
    held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    async def before(self, request: Request) -> None:
        if not self.after_server:
            await self._hold()

    async def answer(self, request: Request, forward: Forward) -> None:
        answer = await forward()
        await answer.body.drain()
        await self._hold()

    async def _hold(self) -> None:
        self.held.set()
        await asyncio.to_thread(self.release.wait)
        raise Broken


@dataclass
class Rule:
    """Which requests a fault befalls.

    Args:
        fault: What happens to them.
        operation: S3 name of the operation, "" for any.
        key: Regular expression that must match somewhere in the path or the listed prefix.
        skip: So many matching requests pass unharmed first.
        times: So many are harmed then.
    """

    fault: Fault
    operation: str = ""
    key: str = ""
    skip: int = 0
    times: int = 1
    hits: int = 0

    def takes(self, request: Request) -> bool:
        if self.operation and self.operation != request.operation:
            return False
        where = request.path + "".join(request.query.get("prefix", []))
        if self.times <= 0 or not re.search(self.key, where):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        self.hits += 1
        return True


@dataclass(frozen=True)
class Seen:
    """One request that came, and the status that the client got; 0 for none."""

    at: float
    operation: str
    path: str
    status: int
    nbytes: int


class FaultProxy:
    """Runs while the context is open, in a thread of its own.

    Args:
        target: URL of the real server.
    """

    def __init__(self, target: str) -> None:
        self._target = ("", 0)
        self.retarget(target)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._rules: list[Rule] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.seen: list[Seen] = []
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def script(self, *rules: Rule) -> None:
        """Replace the script; of several rules that match the first one counts."""
        self._rules = list(rules)

    def retarget(self, target: str) -> None:
        """Connect to another server from now on, or to the same one at its new address."""
        parts = urlsplit(target)
        assert parts.hostname is not None
        self._target = (parts.hostname, parts.port or 80)

    def operations(self) -> Sequence[str]:
        return [seen.operation for seen in self.seen]

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for rule in self._rules:
            if isinstance(rule.fault, Hold):
                rule.fault.release.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while (request := await _read_request(reader, writer)) is not None:
                if upstream is None:
                    upstream = await asyncio.open_connection(*self._target, limit=_HEAD)
                await self._handle(request, upstream)
        except (Broken, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for one in (writer, upstream[1] if upstream else None):
                if one is not None:
                    one.transport.abort()

    async def _handle(
        self, request: Request, upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        fault = next((rule.fault for rule in self._rules if rule.takes(request)), Fault())
        nbytes, status = request.body.left, 0

        async def forward() -> Answer:
            return await _forward(request, *upstream)

        try:
            await fault.before(request)
            answer = await fault.answer(request, forward)
            if answer is None:
                raise Broken
            if isinstance(answer, bytes):
                status = int(answer.split(b" ", 2)[1])
                request.client.write(answer)
                await request.client.drain()
            else:
                status = answer.status
                await _relay(answer, request.client)
        finally:
            self.seen.append(
                Seen(time.monotonic(), request.operation, request.path, status, nbytes)
            )


async def _read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    headers = _headers(lines[1:])
    if headers.pop("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
        head = b"\r\n".join(
            line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:")
        )
    parts = urlsplit(target)
    return Request(
        method=method,
        path=unquote(parts.path),
        query=parse_qs(parts.query, keep_blank_values=True),
        headers=headers,
        raw_head=head,
        client=writer,
        body=Stream(reader, int(headers.get("content-length", "0"))),
    )


async def _forward(
    request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Answer:
    writer.write(request.raw_head)
    async for block in request.body.blocks():
        writer.write(block)
        await writer.drain()
    await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ", 2)[1])
    headers = _headers(lines[1:])
    empty = request.method == "HEAD" or status in (204, 304)
    chunked = not empty and headers.get("transfer-encoding", "").lower() == "chunked"
    length = 0 if empty or chunked else int(headers.get("content-length", "0"))
    return Answer(status, head, Stream(reader, length), chunked)


async def _relay(answer: Answer, client: asyncio.StreamWriter) -> None:
    client.write(answer.head)
    if answer.chunked:
        async for block in _chunks(answer.body.reader):
            client.write(block)
    else:
        async for block in answer.body.blocks():
            client.write(block)
            await client.drain()
    await client.drain()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Pass a chunked body on as it is."""
    while True:
        size = await reader.readuntil(b"\r\n")
        yield size
        yield await reader.readexactly(int(size, 16) + 2)
        if int(size, 16) == 0:
            return


def _headers(lines: Iterable[str]) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, value in pairs}
