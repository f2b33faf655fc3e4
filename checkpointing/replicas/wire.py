"""A connection between two of these processes: who they are, messages, bytes. Every wait ends.

    server  magic, its nonce
    client  its nonce, proof          HMAC-SHA256 with the run's token over role, run and nonces
    server  proof
    then    messages: length (4 bytes, big-endian), a JSON object; and bytes, as messages announce

Nobody sends the token. Until both have proved that they know it only these fixed lengths are read.
"""

import hmac
import json
import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Final, Self

from checkpointing import checked
from checkpointing.errors import ManifestInvalid, ReplicaError
from checkpointing.store.pace import Pacer

MAGIC: Final = b"EVSTREP1"
NONCE: Final = 32
PROOF: Final = 32
MOST_MESSAGE: Final = 16 << 10
SILENCE_S: Final = 20.0
_CONNECT_S: Final = 5.0
_GREETING_S: Final = 10.0
_SPARE_S: Final = 60.0
_SLOWEST: Final = 256 << 10  # bytes per second: what comes slower than that is given up
_PIECE: Final = 8 << 20
_SIP: Final = 1 << 20  # a socket takes no more at once
_LENGTH: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """What both sides of a connection know."""

    run: str
    token: bytes

    def proof(self, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
        """Return what only one that knows the token can say, in this role and for these nonces."""
        said = b"\0".join((MAGIC, role, self.run.encode(), server_nonce + client_nonce))
        return hmac.digest(self.token, said, "sha256")

    def __repr__(self) -> str:
        return f"Secret(run={self.run!r})"  # the token is for no log


class Line:
    """A connected socket. Whatever fails is an OSError or a ReplicaError.

    Args:
        connection: The socket, which this closes.
        seconds: How long all of the conversation may take, until `allow` gives it more.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._socket = connection
        self._deadline = time.monotonic() + seconds

    def no_delay(self) -> None:
        """Have the end of what is sent leave at once."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def allow(self, nbytes: int) -> None:
        """Give the conversation from now on the time that so many bytes may take."""
        self._deadline = time.monotonic() + _SPARE_S + nbytes / _SLOWEST

    def read_into(self, out: memoryview) -> None:
        """Fill all of `out`."""
        while out.nbytes:
            self._wait_no_longer_than(SILENCE_S)
            count = self._socket.recv_into(out)
            if not count:
                raise ReplicaError("the other side broke off")
            out = out[count:]

    def read(self, count: int) -> bytes:
        """Return so many bytes: few."""
        out = bytearray(count)
        self.read_into(memoryview(out))
        return bytes(out)

    def send(self, *parts: bytes) -> None:
        """Send few bytes."""
        self._wait_no_longer_than(SILENCE_S)
        self._socket.sendall(b"".join(parts))

    def send_file(self, file: IO[bytes], at: int, count: int, pace: Pacer) -> None:
        """Send bytes of a file; the kernel takes them from where they lie."""
        for begin, end in _paced(at, at + count, pace):
            self._send_piece(file, begin, end - begin)

    def send_memory(self, file: IO[bytes], at: int, count: int, pace: Pacer) -> None:
        """Send bytes of a file that lies in memory: this core copies them, not the receiver's."""
        if not count:
            return
        first = at - at % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(file.fileno(), at + count - first, prot=mmap.PROT_READ, offset=first)
        except ValueError as error:
            raise ReplicaError("the file ends before its snapshot does") from error
        try:
            for begin, end in _paced(at - first, at - first + count, pace):
                self._send_view(memoryview(mapped)[begin:end])
        finally:
            with suppress(BufferError):  # an error on its way holds the last view
                mapped.close()

    def _send_view(self, view: memoryview) -> None:
        """Send some; `socket.sendall` would allow all of it no more time than one wait."""
        while view.nbytes:
            self._wait_no_longer_than(SILENCE_S)
            view = view[self._socket.send(view[:_SIP]) :]

    def _send_piece(self, file: IO[bytes], at: int, left: int) -> None:
        """Send some; `socket.sendfile` would look at no deadline while a byte goes now and then."""
        ready = select.poll()
        ready.register(self._socket, select.POLLOUT)
        while left:
            self._wait_no_longer_than(SILENCE_S)
            if not ready.poll((self._socket.gettimeout() or 0.0) * 1000):
                raise ReplicaError("the other side takes nothing")
            try:
                sent = os.sendfile(self._socket.fileno(), file.fileno(), at, left)
            except BlockingIOError:
                continue
            if not sent:
                raise ReplicaError("the file ends before its snapshot does")
            at, left = at + sent, left - sent

    def say(self, **fields: Any) -> None:
        """Send a message."""
        body = json.dumps(fields).encode()
        self.send(_LENGTH.pack(len(body)), body)

    def hear(self) -> Mapping[str, Any]:
        """Receive a message: nothing longer than a few kilobytes is one."""
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > MOST_MESSAGE:
            raise ReplicaError(f"a message of {length} bytes")
        try:
            return checked.document(self.read(length))
        except ManifestInvalid as error:
            raise ReplicaError(f"a message that is none: {error}") from error

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_no_longer_than(self, seconds: float) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise ReplicaError("it has taken too long")
        self._socket.settimeout(min(seconds, left))


def _paced(at: int, end: int, pace: Pacer) -> Iterator[tuple[int, int]]:
    """Cut what is sent into pieces, each when the budget allows it."""
    while at < end:
        piece = min(end - at, pace.sip() if pace.bound else _PIECE)
        pace.nbytes(piece)
        yield at, at + piece
        at += piece


def dial(address: str, secret: Secret) -> Line:
    """Connect to another process and prove to each other who one is.

    Raises:
        ReplicaError: It is not one of this run.
        OSError: It does not answer.
    """
    line = Line(socket.create_connection(parse(address), timeout=_CONNECT_S), _GREETING_S)
    try:
        line.no_delay()
        if line.read(len(MAGIC)) != MAGIC:
            raise ReplicaError("the other side speaks something else")
        theirs, mine = line.read(NONCE), secrets.token_bytes(NONCE)
        line.send(mine, secret.proof(b"client", theirs, mine))
        if not hmac.compare_digest(line.read(PROOF), secret.proof(b"server", theirs, mine)):
            raise ReplicaError("the other side does not know the run's token")
        line.allow(0)
    except BaseException:
        line.close()
        raise
    return line


def welcome(connection: socket.socket, secret: Secret) -> Line:
    """Take a connection once the other side has proved who it is; it is closed otherwise.

    Raises:
        ReplicaError: It has not.
        OSError: It said nothing.
    """
    line = Line(connection, _GREETING_S)
    try:
        line.no_delay()
        mine = secrets.token_bytes(NONCE)
        line.send(MAGIC, mine)
        theirs = line.read(NONCE)
        if not hmac.compare_digest(line.read(PROOF), secret.proof(b"client", mine, theirs)):
            raise ReplicaError("somebody who does not know the run's token")
        line.send(secret.proof(b"server", mine, theirs))
        line.allow(0)
    except BaseException:
        line.close()
        raise
    return line


def parse(address: str) -> tuple[str, int]:
    """Split host:port, also [host]:port.

    Raises:
        ReplicaError: It is neither.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ReplicaError(f"{address!r:.80} is no host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
