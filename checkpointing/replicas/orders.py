"""Reads standard input: the run's token, then orders, a line each; its end is the last one."""

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final

_TOKEN_S: Final = 30.0
_SHORTEST_TOKEN: Final = 16
_LONGEST_LINE: Final = 64 << 10
_CHUNK: Final = 16 << 10


class Orders:
    """The lines of a descriptor.

    Args:
        fd: Where they come from.
    """

    def __init__(self, fd: int = 0) -> None:
        self._fd = fd
        self._rest = b""

    def token(self) -> bytes:
        """Return the first line.

        Raises:
            ValueError: None came in time, or it is too short to be a secret.
        """
        deadline = time.monotonic() + _TOKEN_S
        while b"\n" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._fd], [], [], left)[0]:
                raise ValueError("no token came on standard input")
            if not self._more():
                raise ValueError("standard input ended before the token")
        line, _, self._rest = self._rest.partition(b"\n")
        token = line.strip()
        if len(token) < _SHORTEST_TOKEN:
            raise ValueError("the token is too short")
        return token

    def follow(self, obey: Callable[[bytes], None], stop: threading.Event) -> None:
        """Pass on each order until the input ends, and then say stop.

        Args:
            obey: Carries an order out.
            stop: Is set at the end.
        """
        try:
            while True:
                *lines, self._rest = self._rest.split(b"\n")
                for line in lines:
                    if line.strip():
                        obey(line)
                if not self._more():
                    return
        finally:
            stop.set()

    def _more(self) -> bool:
        try:
            chunk = os.read(self._fd, _CHUNK)
        except OSError:
            return False
        self._rest += chunk
        return bool(chunk) and len(self._rest) <= _LONGEST_LINE
