"""One question to a node's kernel: is there a machine, and does the agent's port listen?

The kernel answers a SYN for a listening socket without the process, so a starved or stopped agent
still counts as a living machine, and a port that refuses as a process that is gone.
"""

import asyncio
import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from urllib.parse import urlsplit

ANSWER_S = 0.5
NO_ANSWER = frozenset([errno.EHOSTUNREACH, errno.EHOSTDOWN])

Address = tuple[str, int]


class Answer(StrEnum):
    """What came of a probe."""

    CONNECTED = "connected"
    REFUSED = "refused"
    NOTHING = "nothing"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A question to ask now."""

    node: str
    address: Address
    sent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A probe and what came of it.

    Attributes:
        here: The node is this machine: no network lies between.
    """

    probe: Probe
    answer: Answer
    here: bool = False


@lru_cache(maxsize=4096)
def address_of(url: str) -> Address | None:
    """Return the numeric address and port of a URL; None when it has none: names need a look-up."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        ipaddress.ip_address(host or "")
    except ValueError:
        return None
    return (host, port) if host and port else None


class Prober:
    """Sends probes from the running event loop and waits for none of them."""

    def __init__(self, answered: Callable[[Answered, float], None]) -> None:
        self._answered = answered
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, probe: Probe) -> None:
        """Begin to ask; the answer goes to the callback, with the time at which it came."""
        task = asyncio.ensure_future(self._ask(probe))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ask no more."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, probe: Probe) -> None:
        answered = await ask(probe)
        self._answered(answered, time.monotonic())


async def ask(probe: Probe) -> Answered:
    """Ask once, for at most `ANSWER_S`; never raises but when cancelled."""
    host, _ = probe.address
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as line:
            line.setblocking(False)
            async with asyncio.timeout(ANSWER_S):
                await asyncio.get_running_loop().sock_connect(line, probe.address)
            here = line.getsockname()[0] == host
            return Answered(probe=probe, answer=Answer.CONNECTED, here=here)
    except ConnectionRefusedError:
        answer = Answer.REFUSED
    except TimeoutError:
        answer = Answer.NOTHING
    except OSError as error:
        # No route, no free port, no file handle: that is this side's trouble.
        answer = Answer.NOTHING if error.errno in NO_ANSWER else Answer.UNKNOWN
    return Answered(probe=probe, answer=answer)
