"""What survives a crash, a damaged disk, a full disk and a deposed writer."""

import os
import resource
import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.core import events as ev
from orchestrator.core.codec import CodecError
from orchestrator.core.record import Record
from orchestrator.errors import JournalCorrupt, NotFound
from orchestrator.sealed_line import MARK
from orchestrator.supervisor.journal import FileJournal, parse, read_records, render, state_of
from tests.unit.core.story import Story


def some_records() -> list[Record]:
    return Story().running(step=5).uploads(4).fails().records


def record(seq: int, epoch: int = 1, what: str = "snapshot") -> Record:
    return Record(seq=seq, at=float(seq), epoch=epoch, event=ev.OperatorSaid(what=what))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def written(path: Path, records: list[Record]) -> bytes:
    journal = FileJournal(path)
    journal.append(records)
    journal.close()
    return path.read_bytes()


def test_records_come_back_as_they_were_written(path: Path) -> None:
    records = some_records()
    written(path, records)
    found = read_records(path)
    assert [render(r) for r in found] == [render(r) for r in records]
    assert repr(state_of(found)) == repr(state_of(records))


def test_batches_follow_each_other_over_reopening(path: Path) -> None:
    records = some_records()
    for k in range(0, len(records), 3):
        written(path, records[k : k + 3])
    assert len(read_records(path)) == len(records)


def test_an_empty_batch_and_an_empty_file_are_fine(path: Path) -> None:
    assert written(path, []) == b""
    assert read_records(path) == ()


def test_no_file_is_said_in_one_line(path: Path) -> None:
    with pytest.raises(NotFound, match="no journal at"):
        read_records(path)


def test_a_line_carries_its_record_and_nothing_else(path: Path) -> None:
    line = render(record(1))
    assert line.endswith(b'"}\n')
    assert parse(line) == record(1)
    for wrong in (b"", b"{}", b"\n", line[:-4], line.replace(b'"crc":"', b'"crc":" ')):
        with pytest.raises(ValueError, match=r"CRC|end"):
            parse(wrong)


def test_a_last_line_torn_at_any_byte_is_dropped(path: Path) -> None:
    records = some_records()
    whole = written(path, records)
    last = len(render(records[-1]))
    for cut in range(len(whole) - last, len(whole)):
        path.write_bytes(whole[:cut])
        assert len(read_records(path)) == len(records) - 1, cut


def test_a_journal_cut_anywhere_keeps_a_whole_beginning(path: Path) -> None:
    records = [record(n) for n in range(1, 6)]
    whole = written(path, records)
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        found = read_records(path)
        assert list(found) == records[: whole[:cut].count(b"\n")]


def test_a_writer_cuts_the_torn_line_off_and_goes_on(path: Path) -> None:
    whole = written(path, [record(1), record(2)])
    for cut in range(len(render(record(1))), len(whole)):
        path.write_bytes(whole[:cut])
        written(path, [record(2, what="stop")])
        assert read_records(path) == (record(1), record(2, what="stop"))


def test_a_tail_of_zeros_is_a_torn_line(path: Path) -> None:
    whole = written(path, [record(1)])
    path.write_bytes(whole + b"\0" * 100)
    assert read_records(path) == (record(1),)
    written(path, [record(2)])
    assert read_records(path) == (record(1), record(2))


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF])
def test_a_changed_byte_never_makes_another_record(path: Path, flip: int) -> None:
    records = [record(n, what="stop") for n in range(1, 4)]
    whole = written(path, records)
    last_begins = len(whole) - len(render(records[-1]))
    for offset in range(len(whole)):
        damaged = bytearray(whole)
        damaged[offset] ^= flip
        path.write_bytes(damaged)
        try:
            found = read_records(path)
        except JournalCorrupt:
            continue
        assert offset >= last_begins, "damage before the last line went unseen"
        assert list(found) == records[:-1]


@pytest.mark.parametrize("byte", [b"\n", b"\r", b"\0", b'"', b"}"])
def test_a_byte_that_looks_like_structure_never_makes_another_record(
    path: Path, byte: bytes
) -> None:
    records = [record(n) for n in range(1, 4)]
    whole = written(path, records)
    for offset in range(len(whole)):
        damaged = whole[:offset] + byte + whole[offset + 1 :]
        path.write_bytes(damaged)
        try:
            found = list(read_records(path))
        except JournalCorrupt:
            continue
        assert found == (records if damaged == whole else records[:-1])


def test_a_damaged_line_is_named_and_not_repaired(path: Path) -> None:
    whole = written(path, [record(1), record(2), record(3)])
    path.write_bytes(whole.replace(b'"seq":2', b'"seq":9'))
    before = path.read_bytes()
    with pytest.raises(JournalCorrupt, match="line 2: its CRC does not match"):
        read_records(path)
    with pytest.raises(JournalCorrupt, match="line 2"):
        FileJournal(path)
    assert path.read_bytes() == before


def test_a_missing_line_is_found(path: Path) -> None:
    path.write_bytes(render(record(1)) + render(record(3)))
    with pytest.raises(JournalCorrupt, match="record 3 comes where 2 is missing"):
        read_records(path)


def test_a_whole_line_of_an_unknown_kind_is_never_taken_for_a_torn_one(path: Path) -> None:
    body = render(record(1)).rpartition(MARK)[0].replace(b"OperatorSaid", b"OperatorHinted")
    line = body + MARK + b"%08x" % zlib.crc32(body) + b'"}\n'
    with pytest.raises(CodecError, match="OperatorHinted"):
        parse(line)
    for whole in (line + render(record(2)), line):
        path.write_bytes(whole)
        with pytest.raises(JournalCorrupt, match=r"line 1: .*OperatorHinted"):
            read_records(path)
        with pytest.raises(JournalCorrupt, match="line 1"):
            FileJournal(path)
        assert path.read_bytes() == whole


def test_lines_of_a_deposed_writer_do_not_count(path: Path) -> None:
    old = FileJournal(path)
    old.append([record(1), record(2)])
    new = FileJournal(path)
    new.append([record(3, epoch=2)])
    old.append([record(3, what="stop"), record(4, what="stop")])
    new.append([record(4, epoch=2)])
    old.append([record(5, what="stop")])
    old.close()
    new.close()
    expected = (record(1), record(2), record(3, epoch=2), record(4, epoch=2))
    assert read_records(path) == expected
    written(path, [record(5, epoch=3)])
    assert read_records(path) == (*expected, record(5, epoch=3))


def test_what_a_deposed_writer_wrote_behind_the_new_ones_back_does_not_count(path: Path) -> None:
    old = FileJournal(path)
    old.append([record(1), record(2)])
    assert len(read_records(path)) == 2  # what the new writer builds on
    old.append([record(3, what="stop"), record(4, what="stop")])
    new = FileJournal(path)
    new.append([record(3, epoch=2)])
    old.close()
    new.close()
    assert read_records(path) == (record(1), record(2), record(3, epoch=2))


def test_a_deposed_writer_without_room_cuts_off_its_own_bytes_only(path: Path) -> None:
    old = FileJournal(path)
    old.append([record(1)])
    new = FileJournal(path)
    new.append([record(2, epoch=2)])
    with room_for(path.stat().st_size + 10), pytest.raises(OSError, match="too large"):
        old.append([record(2), record(3)])
    old.close()
    new.close()
    assert read_records(path) == (record(1), record(2, epoch=2))


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Let this process write no file beyond `nbytes`, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_batch_is_written_whole_or_not_at_all_on_a_full_disk(path: Path) -> None:
    first = [record(1), record(2)]
    batch = [record(3), record(4), record(5)]
    whole = written(path, first)
    journal = FileJournal(path)
    for room in range(sum(len(render(r)) for r in batch)):
        with room_for(len(whole) + room), pytest.raises(OSError, match="too large"):
            journal.append(batch)
        assert path.read_bytes() == whole, room
    journal.append(batch)
    journal.close()
    assert list(read_records(path)) == [*first, *batch]


def test_a_cut_that_fails_too_is_made_before_the_next_batch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = written(path, [record(1)])
    journal = FileJournal(path)

    def broken(fd: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, room_for(len(whole) + 30):
        patch.setattr(os, "ftruncate", broken)
        with pytest.raises(OSError, match="too large"):
            journal.append([record(2)])
        with pytest.raises(OSError, match="Input/output"):
            journal.append([record(2)])
    assert len(path.read_bytes()) == len(whole) + 30
    journal.append([record(2)])
    journal.close()
    assert read_records(path) == (record(1), record(2))


def test_a_disk_that_cannot_be_reached_takes_nothing_back_that_was_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = FileJournal(path)
    journal.append([record(1)])

    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="Input/output"):
            journal.append([record(2)])
    journal.append([record(2, what="stop")])
    journal.close()
    assert read_records(path) == (record(1), record(2, what="stop"))


def test_a_journal_can_be_read_while_it_is_written(path: Path) -> None:
    journal = FileJournal(path)
    for n in range(1, 20):
        journal.append([record(n)])
        assert len(read_records(path)) == n
    journal.close()


def test_a_thousand_torn_batches_leave_a_readable_journal(path: Path) -> None:
    """A crash inside `write` at a random place, again and again."""
    kept = 0
    for n in range(60):
        journal = FileJournal(path)
        kept = len(read_records(path))
        journal.append([record(kept + 1, epoch=n + 1), record(kept + 2, epoch=n + 1)])
        journal.close()
        raw = path.read_bytes()
        path.write_bytes(raw[: len(raw) - (n * 7) % 90])
        read_records(path)
    assert kept > 30
