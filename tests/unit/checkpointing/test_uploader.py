import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from checkpointing import keys
from checkpointing.errors import StoreUnavailable
from checkpointing.stage.arena import MappedArena, StagedSlot, UploadState, peek
from checkpointing.stage.stager import Stager
from checkpointing.store.base import StoreConfig
from checkpointing.store.directory import DirectoryStore
from checkpointing.store.transfer import Transfer
from checkpointing.uploader import watch
from checkpointing.uploader.watch import Watcher


class Bench:
    """A node folder, a store that can be made to fail, and a watcher that is polled by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "node"
        self.folder.mkdir()
        root = folder / "store"
        root.mkdir()
        self.store = DirectoryStore(root)
        self.events: list[Mapping[str, Any]] = []
        self.listening = True
        self.stager = self.rank(0)
        self.watcher = self.new_watcher()

    def rank(self, rank: int, world: int = 1) -> Stager:
        return Stager(self.folder / f"arena-{rank}", attempt=1, rank=rank, world=world)

    def new_watcher(self) -> Watcher:
        def emit(event: Mapping[str, Any]) -> bool:
            if self.listening:
                self.events.append(event)
            return self.listening

        return Watcher(self.folder, self.store, "r", emit)

    def stage(self, step: int) -> None:
        self.stager.stage(step, {"m": {"w": np.full(5000, step)}}, None)

    def settle(self) -> None:
        """Poll until nothing is left to do."""
        deadline, idle = time.monotonic() + 20, 0
        while time.monotonic() < deadline and idle < 3:
            self.watcher.poll()
            idle = 0 if self.watcher.busy else idle + 1
            time.sleep(0.005)

    def settle_until_uploaded(self) -> None:
        """Poll until the only slot is in the store."""
        deadline = time.monotonic() + 20
        while set(self.states().values()) != {"uploaded"} and time.monotonic() < deadline:
            self.watcher.poll()
            time.sleep(0.005)

    def states(self) -> dict[int, str]:
        return {slot.step: slot.upload_state for slot in peek(self.folder / "arena-0")}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_each_slot_is_uploaded_once_oldest_first(bench: Bench) -> None:
    bench.stage(1)
    bench.stage(2)
    bench.settle()
    assert [(e["event"], e["step"]) for e in bench.events] == [("uploaded", 1), ("uploaded", 2)]
    assert set(bench.states().values()) == {"uploaded"}
    bench.settle()
    assert len(bench.events) == 2
    event = bench.events[0]
    assert set(event) == {
        *("event", "rank", "attempt", "step", "world", "index_key", "index_crc64"),
        *("nbytes", "upload_s", "staged_at"),
        *("sent_nbytes", "sent_s", "gb_per_s", "retries", "hedges", "plane"),
    }
    assert event["nbytes"] == 40_000
    json.dumps(event)


def test_the_time_to_the_store_counts_from_the_staging_on_a_clock_that_nobody_sets(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.settle()  # an uploader that was there before
    monkeypatch.setattr(time, "time", lambda: 1e9)  # set back by years after the staging
    bench.stage(1)
    bench.watcher.poll()
    time.sleep(0.05)
    bench.settle()
    (event,) = bench.events
    assert 0 < event["upload_s"] < 20
    assert event["upload_s"] >= event["sent_s"]


def test_the_age_of_what_was_there_before_the_uploader_is_not_known(bench: Bench) -> None:
    bench.stage(1)
    bench.settle()
    bench.stage(2)
    bench.settle()
    assert [event["upload_s"] is None for event in bench.events] == [True, False]


def test_only_owned_extents_are_uploaded(bench: Bench) -> None:
    state = {f"w{i}": np.full(1000, i, np.uint8) for i in range(4)}
    for rank in (0, 1):
        bench.rank(rank, world=2).stage(3, state, {"own": np.zeros(10, np.uint8)})
    bench.settle()
    assert sorted((e["rank"], e["nbytes"]) for e in bench.events) == [(0, 2010), (1, 2010)]


def test_a_rank_that_owns_nothing_has_an_index_only(bench: Bench) -> None:
    for rank in (0, 1):
        bench.rank(rank, world=2).stage(3, {"w": np.zeros(10)}, None)
    bench.settle()
    assert bench.store.head(keys.index_key("r", 3, 1, 1)) is not None
    assert bench.store.head(keys.data_key("r", 3, 1, 1)) is None


def test_a_slot_left_uploading_by_a_killed_uploader_is_sent(bench: Bench) -> None:
    bench.stage(1)
    arena = MappedArena(bench.folder / "arena-0")
    arena.headers[0].mark(arena.staged()[0].sequence, UploadState.UPLOADING)
    arena.close()
    bench.settle()
    assert bench.states() == {1: "uploaded"}


def test_a_failure_is_reported_and_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_FIRST_WAIT_S", 0.01)
    real, failures = bench.store.upload, [0]

    def flaky(*arguments: Any) -> Transfer:
        if failures[0] < 3:
            failures[0] += 1
            raise StoreUnavailable("503\nSlow Down")
        return real(*arguments)

    monkeypatch.setattr(bench.store, "upload", flaky)
    bench.stage(1)
    bench.settle_until_uploaded()
    assert [e["event"] for e in bench.events] == ["upload_failed"] * 3 + ["uploaded"]
    assert bench.events[0]["error"] == "503 Slow Down"
    assert not bench.events[0]["final"]


def test_an_arena_that_cannot_be_mapped_now_is_tried_again_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_FIRST_WAIT_S", 0.01)
    failures = [0]

    def busy(path: Path) -> MappedArena:
        if failures[0] < 2:
            failures[0] += 1
            raise OSError(24, "Too many open files")
        return MappedArena(path)

    monkeypatch.setattr(watch, "MappedArena", busy)
    bench.stage(1)
    bench.settle_until_uploaded()
    assert [e["event"] for e in bench.events] == ["upload_failed"] * 2 + ["uploaded"]
    assert "Too many open files" in bench.events[0]["error"]


def test_what_failed_with_one_uploader_is_tried_by_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any) -> None:
        raise StoreUnavailable("down")

    monkeypatch.setattr(bench.store, "upload", down)
    bench.stage(1)
    bench.settle()
    monkeypatch.undo()
    bench.watcher = bench.new_watcher()
    bench.settle()
    assert bench.states() == {1: "uploaded"}


def test_a_later_save_takes_the_place_of_a_failed_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any) -> None:
        raise StoreUnavailable("down")

    monkeypatch.setattr(bench.store, "upload", down)
    bench.stage(1)
    bench.settle()
    assert bench.states() == {1: "failed"}
    bench.stage(2)
    monkeypatch.undo()
    bench.settle()
    assert bench.states() == {2: "uploaded", 1: "failed"}
    final = [e for e in bench.events if e["event"] == "upload_failed" and e["final"]]
    assert [e["step"] for e in final] == [1]


def test_other_content_under_the_same_key_is_final(bench: Bench) -> None:
    bench.store.put_if_absent(keys.data_key("r", 1, 1, 0), b"foreign")
    bench.stage(1)
    bench.settle()
    assert [(e["event"], e["final"]) for e in bench.events] == [("upload_failed", True)]
    assert bench.states() == {1: "failed"}
    assert bench.store.get(keys.data_key("r", 1, 1, 0)) == b"foreign"


def test_bytes_changed_under_the_uploader_never_become_an_object(bench: Bench) -> None:
    bench.stage(1)
    arena = MappedArena(bench.folder / "arena-0")
    arena.data(arena.staged()[0].index)[9] ^= 1
    arena.close()
    bench.settle()
    assert bench.store.list("r/") == ()
    assert bench.states() == {1: "failed"}


def test_an_upload_that_nobody_heard_of_is_told_by_the_next_uploader(bench: Bench) -> None:
    bench.stage(1)
    bench.listening = False
    bench.settle()
    assert not bench.watcher.heard
    assert bench.states() == {1: "uploading"}
    bench.listening = True
    bench.watcher = bench.new_watcher()
    bench.settle()
    assert [e["step"] for e in bench.events] == [1]
    assert bench.states() == {1: "uploaded"}


def _process(folder: Path, store: str, *words: str, **options: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "checkpointing.uploader", "--dir", str(folder)]
    return subprocess.Popen([*command, "--store", store, "--run", "r", *words], **options)


def test_each_slot_of_a_replaced_arena_is_sent_under_its_own_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.stage(1)
    real = bench.watcher._send

    def late(path: Path, staged: StagedSlot) -> None:
        if staged.step == 1:  # waits for a thread while the state grows and gets a new file
            bench.stager.stage(2, {"m": {"w": np.full(50_000, 2)}}, None)
        real(path, staged)

    monkeypatch.setattr(bench.watcher, "_send", late)
    bench.settle()
    assert [event["step"] for event in bench.events] == [1, 2], "the new file holds both"
    for step, nbytes in ((1, 40_000), (2, 400_000)):
        assert bench.store.get(keys.data_key("r", step, 1, 0)) == bytes([step, *[0] * 7]) * (
            nbytes // 8
        )


def test_wrong_arguments_are_one_line_and_exit_2(tmp_path: Path) -> None:
    good = StoreConfig(url=tmp_path.as_uri()).to_json()
    for folder, store in (
        (tmp_path, "{}"),
        (tmp_path, "nonsense"),
        (tmp_path, '{"url": "http://x"}'),
        (tmp_path / "none", good),
    ):
        process = _process(folder, store, stderr=subprocess.PIPE)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 2
        assert len(errors.splitlines()) == 1


def test_a_cap_of_the_command_line_holds(bench: Bench) -> None:
    store = StoreConfig(url=(bench.folder.parent / "store").as_uri()).to_json()
    for wrong in ("0", "-3", "inf", "fast"):
        process = _process(bench.folder, store, "--max-bytes-per-s", wrong, stderr=subprocess.PIPE)
        assert process.communicate(timeout=30)[1]
        assert process.returncode == 2
    bench.stager.stage(1, {"m": {"w": np.zeros(2 << 20)}}, None)  # 16 MiB
    process = _process(
        bench.folder, store, "--max-bytes-per-s", str(8 << 20), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert _next_report(process.stdout)["sent_s"] > 1.5
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()


def test_sigterm_ends_with_0_and_the_folder_is_free_for_the_next(bench: Bench) -> None:
    store = StoreConfig(url=(bench.folder.parent / "store").as_uri()).to_json()
    bench.stage(1)
    first = _process(bench.folder, store, stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert _next_report(first.stdout)["step"] == 1
    second = _process(bench.folder, store, stdout=subprocess.PIPE)
    assert second.stdout is not None
    first.terminate()
    assert first.wait(20) == 0
    bench.stage(2)
    assert _next_report(second.stdout)["step"] == 2
    second.terminate()
    assert second.wait(20) == 0
    first.stdout.close()
    second.stdout.close()


def test_until_eof_it_outlives_sigterm_and_ends_with_its_input(bench: Bench) -> None:
    """The snapshot that a planned stop stages after the scheduler's SIGTERM is not lost."""
    store = StoreConfig(url=(bench.folder.parent / "store").as_uri()).to_json()
    process = _process(
        bench.folder, store, "--until-eof", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    bench.stage(1)
    assert _next_report(process.stdout)["step"] == 1
    process.terminate()
    bench.stage(2)
    assert _next_report(process.stdout)["step"] == 2
    process.stdin.close()
    assert process.wait(20) == 0
    process.stdout.close()


def test_an_uploader_whose_listener_is_gone_finishes_and_ends(bench: Bench) -> None:
    store = StoreConfig(url=(bench.folder.parent / "store").as_uri()).to_json()
    reading, writing = os.pipe()
    process = _process(bench.folder, store, stdout=writing)
    os.close(writing)
    os.close(reading)
    bench.stage(1)
    assert process.wait(30) == 0
    assert bench.store.head(keys.index_key("r", 1, 1, 0)) is not None


def _next_report(output: IO[bytes]) -> dict[str, Any]:
    """Return the next line that is more than a sign of life."""
    while (event := json.loads(output.readline())) == {"event": "alive"}:
        pass
    found: dict[str, Any] = event
    return found
