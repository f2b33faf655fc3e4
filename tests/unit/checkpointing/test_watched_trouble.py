"""Watched folders where something beside the trainer goes wrong: disks, deaths, long uploads."""

import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpointing.errors import CheckpointingError, StoreUnavailable
from checkpointing.store.directory import DirectoryStore
from checkpointing.watched import __main__ as process
from checkpointing.watched import attempts, verbs, watching
from checkpointing.watched.disk import Finished, Look, look
from checkpointing.watched.sending import Sending
from tests.unit.checkpointing.watched import NAME, Watch, content, write

NOBODY = 65_534
SMALL = {"model.bin": b"m" * 5000, "sub/rng.bin": b"r" * 17, "empty": b""}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("documents", "sending"):
        monkeypatch.setattr(f"checkpointing.watched.{module}.PIECE", 4096)


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


def test_an_attempt_after_a_torn_line_is_known(tmp_path: Path) -> None:
    path = tmp_path / "attempts"
    attempts.note(path, 1, 2)
    with path.open("ab") as file:
        file.write(b'{"attempt": 2, "nod')
    attempts.note(path, 3, 2)
    assert [one.number for one in attempts.read(path)] == [1, 3]


def test_an_attempt_that_cannot_be_noted_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, bytes(data)[:7]) and 7)
    attempts.note(tmp_path / "attempts", 1, 2)
    assert [one.number for one in attempts.read(tmp_path / "attempts")] == [1]


def unreadable(name: str) -> Callable[[Path], Look]:
    def looked(path: Path) -> Look:
        if path.name == name:
            raise OSError(5, "Input/output error")
        return look(path)

    return looked


@pytest.mark.parametrize("how", ["rename", "marker"])
def test_an_entry_that_cannot_be_read_stops_no_other_and_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    watch = Watch(tmp_path, {"finished": Finished(how=how, marker="empty")})
    write(watch.out / "checkpoint-1", SMALL)
    write(watch.out / "checkpoint-2", SMALL)
    monkeypatch.setattr(watching, "look", unreadable("checkpoint-2"))
    watch.poll()
    watch.poll()
    assert watch.told("committed") == ["checkpoint-1"]
    assert watch.watching.pending == ("checkpoint-2",)
    assert not watch.watching.done
    assert [why for why in watch.said if "Input/output error" in why] != []
    monkeypatch.setattr(watching, "look", look)
    watch.poll()
    assert watch.told("committed") == ["checkpoint-1", "checkpoint-2"]
    assert watch.watching.done


def test_an_entry_that_cannot_be_read_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path, {"delete": True, "keep": 1})
    write(watch.out / "checkpoint-1", SMALL)
    watch.poll()
    monkeypatch.setattr(watching, "look", unreadable("checkpoint-1"))
    write(watch.out / "checkpoint-2", SMALL)
    watch.poll()
    assert not watch.told("removed")
    monkeypatch.setattr(watching, "look", look)
    watch.poll()
    assert watch.told("removed") == ["checkpoint-1"]


def test_a_directory_that_does_not_answer_is_not_an_absent_one(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path, **_: Any) -> os.stat_result:
        raise OSError(116, "Stale file handle")

    write(watch.out / "checkpoint-1", SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stale)
        watch.poll()
    assert not watch.watching.done
    assert "Stale file handle" in watch.said[0]
    watch.poll()
    assert watch.watching.done


def test_a_restore_removes_what_a_killed_one_left(watch: Watch, tmp_path: Path) -> None:
    write(watch.out / "checkpoint-1", SMALL)
    watch.poll()
    left = tmp_path / "back/.0badcafe.everstep-partial"
    write(left, SMALL)
    assert watch.fetched() == content(watch.out / "checkpoint-1")
    assert not left.exists()


def test_a_restore_leaves_alone_what_another_one_writes(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    write(watch.out / "checkpoint-1", SMALL)
    watch.poll()
    other = tmp_path / "back/.0badcafe.everstep-partial"
    write(other, SMALL)
    monkeypatch.setattr(verbs.fcntl, "flock", no_locks)
    assert watch.fetched() == content(watch.out / "checkpoint-1")
    assert other.exists()


def test_a_name_as_long_as_names_may_be_comes_back(watch: Watch) -> None:
    folder = watch.out / ("checkpoint-" + "\u6b65" * 81)
    write(folder, SMALL)
    watch.poll()
    assert watch.fetched() == content(folder)


class Slow(DirectoryStore):
    """A store in which every piece takes a while."""

    def upload(self, *args: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return super().upload(*args, **options)


def test_the_time_at_the_end_counts_from_the_word_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path, store=None)
    write(watch.out / "checkpoint-1", {"model.bin": b"m" * 4096 * 400})
    words = ["watched", "--dir", str(watch.out), "--pattern", "checkpoint-*", "--finished"]
    words += ["rename", "--store", "file:///none", "--name", NAME]
    monkeypatch.setattr("sys.argv", [*words, "--drain-s", "0.2"])
    handlers: dict[int, Callable[[], None]] = {}
    monkeypatch.setattr(process.signal, "signal", handlers.__setitem__)
    options = process._options()

    def told_to_end() -> None:
        handlers[signal.SIGTERM]()

    threading.Timer(0.2, told_to_end).start()
    begun = time.monotonic()
    (tmp_path / "slow").mkdir()
    assert process._watch(Slow(tmp_path / "slow"), process._rules(options), options) == 1
    assert time.monotonic() - begun < 3


def test_pieces_that_are_sent_are_remembered_no_longer_and_failures_are_noticed() -> None:
    sending = Sending(DirectoryStore(Path()), NAME, "e", "a", lambda: False)
    sending._free.put(bytearray(1))
    sending._free.put(bytearray(1))
    done: Future[None] = Future()
    done.set_result(None)
    sending._running = [done, done, Future()]
    sending._buffer()
    assert len(sending._running) == 1
    sending._running[0].set_exception(StoreUnavailable("gone"))
    with pytest.raises(CheckpointingError, match="gone"):
        sending._buffer()


def test_the_store_itself_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["watched", "--store", tmp_path.as_uri(), "--name", "run", "--pattern", "*", "--once"]
    monkeypatch.setattr("sys.argv", [*words, "--delete", "--dir", str(tmp_path / "run")])
    assert process.main() == 2
    line = capsys.readouterr().err
    assert line.startswith("watched: --dir: ")
    assert "is inside of the store" in line


@contextmanager
def as_a_user() -> Iterator[Path]:
    """Go on as somebody whom file modes bind, with a folder of his own."""
    with tempfile.TemporaryDirectory(prefix="everstep-test-") as name:
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(name, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)


def test_files_that_are_only_read_come_back_from_several_nodes_to_a_user() -> None:
    with as_a_user() as home:
        rules: dict[str, Any] = {"nodes": 2}
        one, two = (Watch(home, {**rules, "node": node, "out": f"out-{node}"}) for node in "ab")
        for watch, own in ((one, b"0"), (two, b"1")):
            write(watch.out / "checkpoint-1", {"config": b"c", f"rank-{own.decode()}": own})
            for path in (watch.out / "checkpoint-1").iterdir():
                path.chmod(0o444)
                os.utime(path, ns=(1, 1))
        for watch in (one, two, one):
            watch.poll()
        back = one.fetched(node="c", into="back")
        assert back == {"config": b"c", "rank-0": b"0", "rank-1": b"1"}
        (config,) = (home / "back").glob("*/config")
        assert stat.S_IMODE(config.stat().st_mode) == 0o444
