"""A rank's output: into its log file with the time before each line, and past the signatures."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from monitors.logs.scan import Match, Scanner
from orchestrator.agent.log_file import LogFile

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
        """Copy until the end of the pipe; a full disk or a slow one loses lines, never the rank."""
        file = LogFile(self._path)
        rest = b""
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > LONGEST_LINE_BYTES:
                    lines.append(rest)
                    rest = b""
                self._take(lines, file)
            if rest:
                self._take([rest], file)
            await file.closed()
        finally:
            file.close()
            if file.dropped:
                log.warning("rank %d: %d lines are not in its log", self._rank, file.dropped)

    def _take(self, lines: list[bytes], file: LogFile) -> None:
        if not lines:
            return
        now = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        head = f"{now}Z [{self._rank}] ".encode()
        file.write(b"".join(head + line + b"\n" for line in lines), len(lines))
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
