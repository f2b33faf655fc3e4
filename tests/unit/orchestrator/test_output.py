import asyncio
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from monitors.logs.scan import Match, Scanner
from orchestrator.agent import log_file, output
from orchestrator.agent.log_file import LogFile
from orchestrator.agent.output import OutputCapture

HEAD = re.compile(rb"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \[3\] ")
SCANNER = Scanner()
OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def captured(path: Path, chunks: Sequence[bytes]) -> tuple[OutputCapture, list[Match]]:
    """Let a rank say the chunks, one read each; return the capture and what it found."""
    matches: list[Match] = []
    capture = OutputCapture(path, 3, SCANNER, matches.append)

    async def main() -> None:
        reader = asyncio.StreamReader(limit=2**20)
        copying = asyncio.ensure_future(capture.run(reader))
        for chunk in chunks:
            reader.feed_data(chunk)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        reader.feed_eof()
        await copying

    asyncio.run(main())
    return capture, matches


def said(path: Path) -> list[bytes]:
    """Return the lines in the file without their heads, which every line must have."""
    lines = path.read_bytes().splitlines()
    assert all(HEAD.match(line) for line in lines)
    return [HEAD.sub(b"", line) for line in lines]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attempt-0001" / "rank-00003.log"


def test_each_line_carries_its_time_and_rank(path: Path) -> None:
    capture, _ = captured(path, [b"one\ntwo\n", b"three\n"])
    assert said(path) == [b"one", b"two", b"three"]
    assert (capture.lines, capture.last_line) == (3, "three")


def test_a_line_in_pieces_is_one_line(path: Path) -> None:
    captured(path, [b"o", b"n", b"e\nt", b"wo\n"])
    assert said(path) == [b"one", b"two"]


def test_the_last_words_count_without_a_newline(path: Path) -> None:
    capture, _ = captured(path, [b"one\nSegmentation fau", b"lt"])
    assert said(path) == [b"one", b"Segmentation fault"]
    assert capture.last_line == "Segmentation fault"


def test_a_line_without_end_is_cut_and_held_in_bounds(path: Path) -> None:
    long = b"x" * (3 * output.LONGEST_LINE_BYTES)
    captured(path, [long[:1000], *(long[n : n + 5000] for n in range(1000, len(long), 5000))])
    lines = said(path)
    assert b"".join(lines) == long
    assert len(lines) > 1
    assert max(map(len, lines)) <= output.LONGEST_LINE_BYTES + output.CHUNK_BYTES


def test_bytes_that_are_no_text_are_kept_and_shown_as_far_as_they_go(path: Path) -> None:
    capture, _ = captured(path, [b"loss \xff\xfe\x00 1\n"])
    assert said(path) == [b"loss \xff\xfe\x00 1"]
    assert capture.last_line == "loss \ufffd\ufffd\x00 1"


def test_the_last_line_is_the_last_that_says_anything(path: Path) -> None:
    capture, _ = captured(path, [b"ValueError: no\n\n   \n"])
    assert capture.last_line == "ValueError: no"


def test_a_long_last_line_keeps_its_end(path: Path) -> None:
    capture, _ = captured(path, [b"a" * 1000 + "\u00e9".encode() * 400 + b"END\n"])
    assert capture.last_line.endswith("\u00e9END")
    assert len(capture.last_line) <= output.KEPT_CHARS


def test_a_known_text_is_told_once(path: Path) -> None:
    _, matches = captured(path, [OOM + b"\n", b"fine\n" + OOM + b"\n"])
    assert len(matches) == 1
    assert "out of memory" in matches[0].text


def test_two_known_texts_are_two(path: Path) -> None:
    other = b"NVRM: Xid (PCI:0000:4f:00): 48, pid=1, name=python, double bit error"
    _, matches = captured(path, [OOM + b"\n" + other + b"\n" + OOM + b"\n"])
    names = [match.signature for match in matches]
    assert len(names) == len(set(names)) == 2


def test_a_full_disk_loses_lines_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    capture, matches = captured(path, [b"one\n", OOM + b"\n"])
    assert capture.lines == 2
    assert "out of memory" in capture.last_line
    assert len(matches) == 1


def test_a_log_that_cannot_be_opened_loses_lines_and_nothing_else(path: Path) -> None:
    path.parent.write_text("a file where the folder should be")
    capture, matches = captured(path, [b"one\n", OOM + b"\n"])
    assert capture.lines == 2
    assert len(matches) == 1


def test_attempts_append_and_never_overwrite(path: Path) -> None:
    captured(path, [b"one\n"])
    captured(path, [b"two\n"])
    assert said(path) == [b"one", b"two"]


def test_a_log_that_grows_too_large_goes_on_in_a_new_part(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "FILE_BYTES", 1000)
    for count in range(60):  # one loop each: a restarted agent goes on with the parts there are
        captured(path, [b"line %d\n" % count])
    parts = [Path(f"{path}.2"), Path(f"{path}.1"), path]
    assert sorted(path.parent.iterdir()) == sorted(parts)
    assert all(part.stat().st_size <= 1000 for part in parts)
    kept = [line for part in parts for line in said(part)]
    assert kept == [b"line %d" % count for count in range(60 - len(kept), 60)]
    assert len(kept) > 40


def test_parts_that_cannot_be_renamed_lose_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "FILE_BYTES", 100)
    Path(f"{path}.1").mkdir(parents=True)
    Path(f"{path}.2", "full").mkdir(parents=True)
    captured(path, [b"line %d\n" % count for count in range(20)])
    assert said(path) == [b"line %d" % count for count in range(20)]


def test_a_stuck_disk_holds_nobody_up_and_what_does_not_fit_is_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody reads, in place of a file server that does not answer."""
    monkeypatch.setattr(log_file, "WAITING_BYTES", 1000)
    path.parent.mkdir()
    os.mkfifo(path)
    hold = os.open(path, os.O_RDWR)

    async def main() -> None:
        file = LogFile(path)
        for _ in range(40):
            file.write(b"x" * 4096, 1)  # 64 KiB is what a pipe holds
        assert file.dropped > 0
        file.close()
        os.set_blocking(hold, False)
        got = 0
        while not file._written.is_set():
            try:
                got += len(os.read(hold, 65536))
            except BlockingIOError:
                await asyncio.sleep(0.005)
        assert got <= (40 - file.dropped) * 4096

    asyncio.run(main())
    os.close(hold)
