"""A rank's output: into its log file with the time before each line, and past the signatures."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from monitors.logs.scan import Match, Scanner

log = logging.getLogger(__name__)

CHUNK_BYTES = 65_536
LONGEST_LINE_BYTES = 16_384
KEPT_CHARS = 300


class OutputCapture:
    """Copies one rank's pipe into one file; `last_line` is what it said last."""

    def __init__(
        self, path: Path, rank: int, scanner: Scanner, matched: Callable[[Match], None]
    ) -> None:
        self._path = path
        self._rank = rank
        self._scanner = scanner
        self._matched = matched
        self._seen: set[str] = set()
        self.last_line = ""
        self.lines = 0

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Copy until the end of the pipe; a full disk loses lines, never the rank."""
        with self._open() as file:
            rest = b""
            while chunk := await reader.read(CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > LONGEST_LINE_BYTES:
                    lines.append(rest)
                    rest = b""
                self._take(lines, file)
            if rest:
                self._take([rest], file)

    def _open(self) -> BinaryIO:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._path.open("ab", buffering=0)
        except OSError as error:
            log.warning("rank %d has no log: %s", self._rank, error)
            return Path(os.devnull).open("ab", buffering=0)

    def _take(self, lines: list[bytes], file: BinaryIO) -> None:
        if not lines:
            return
        now = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        head = f"{now}Z [{self._rank}] ".encode()
        with contextlib.suppress(OSError):  # the log is for people; training goes on without it
            file.write(b"".join(head + line + b"\n" for line in lines))
        for line in lines:
            self._look_at(line)

    def _look_at(self, line: bytes) -> None:
        self.lines += 1
        text = line.strip()
        if text:
            self.last_line = text[-4 * KEPT_CHARS :].decode(errors="replace")[-KEPT_CHARS:]
        match = self._scanner.scan(line)
        if match is not None and match.signature not in self._seen:
            self._seen.add(match.signature)
            self._matched(match)
