"""A log file that can never hold up who writes to it: written by a thread, bounded, rotated.

The folder is often on a network file system, where a write may take minutes. The agent has
heartbeats to send meanwhile.
"""

import asyncio
import collections
import itertools
import logging
import os
import sys
import threading
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

WAITING_BYTES = 4 * 1024 * 1024
FILE_BYTES = 64 * 1024 * 1024
KEPT_FILES = 3


class LogFile:
    """Appends to a file; of one that grows too large the last `KEPT_FILES` parts stay.

    The newest part has the name itself, the ones before it `.1`, `.2` behind the name.

    Attributes:
        dropped: Lines that were lost, because the file could not be written, or not fast enough.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: collections.deque[tuple[bytes, int]] = collections.deque()
        self._bytes = 0
        self._closed = False
        self._change = threading.Condition()
        self._size = 0
        self._file_bytes = FILE_BYTES
        self._told = False
        self._written = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.dropped = 0
        # A daemon: the interpreter must not wait for a file server that is gone.
        threading.Thread(target=self._run, name=f"log {path.name}", daemon=True).start()

    def write(self, text: bytes, lines: int) -> None:
        """Have whole lines written; returns at once."""
        with self._change:
            if self._bytes + len(text) > WAITING_BYTES and self._waiting:
                self.dropped += lines
                return
            self._waiting.append((text, lines))
            self._bytes += len(text)
            self._change.notify()

    def close(self) -> None:
        """Write no more than what waits already."""
        with self._change:
            self._closed = True
            self._change.notify()

    async def closed(self) -> None:
        """Close it, and wait until everything is written."""
        self.close()
        await self._written.wait()

    def _run(self) -> None:
        file: BinaryIO | None = None
        try:
            file = self._open()
            while blocks := self._next():
                file = self._append(file, blocks)
        finally:
            if file is not None:
                file.close()
            try:
                self._loop.call_soon_threadsafe(self._written.set)
            except RuntimeError:  # the loop has ended without waiting for this
                log.debug("%s was written behind the end", self._path)

    def _next(self) -> list[tuple[bytes, int]]:
        """Wait for something to write; nothing at the end."""
        with self._change:
            while not self._waiting and not self._closed:
                self._change.wait()
            blocks = list(self._waiting)
            self._waiting.clear()
            self._bytes = 0
            return blocks

    def _append(self, file: BinaryIO | None, blocks: list[tuple[bytes, int]]) -> BinaryIO | None:
        for text, lines in blocks:
            try:
                if file is None:
                    file = self._open()
                elif 0 < self._size > self._file_bytes - len(text):
                    file = self._next_part(file)
                if file is None:
                    self._lose(lines)
                    continue
                left = memoryview(text)
                while left:
                    count = file.write(left)
                    self._size += count
                    left = left[count:]
            except OSError as error:  # the log is for people; training goes on without it
                log.debug("%s: %s", self._path, error)
                self._lose(lines)
        return file

    def _lose(self, lines: int) -> None:
        with self._change:
            self.dropped += lines

    def _open(self) -> BinaryIO | None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("ab", buffering=0)
            self._size = os.fstat(file.fileno()).st_size
            return file
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning("%s cannot be opened: %s", self._path, error)
            return None

    def _next_part(self, file: BinaryIO) -> BinaryIO | None:
        """Begin the file anew; the oldest part goes."""
        names = [self._path, *(Path(f"{self._path}.{n}") for n in range(1, KEPT_FILES))]
        try:
            for newer, older in reversed(tuple(itertools.pairwise(names))):
                if newer.exists():
                    newer.replace(older)
        except OSError as error:
            log.warning("%s grows without bounds: %s", self._path, error)
            self._file_bytes = sys.maxsize
            return file
        file.close()
        return self._open()
