import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checkpointing.checksum import crc64
from checkpointing.errors import ArenaInvalid, StageBusy, StageRefused
from checkpointing.sources import ArenaSource
from checkpointing.stage import admission, memory
from checkpointing.stage.arena import PAGE, MappedArena, UploadState, peek
from checkpointing.stage.stager import Stager
from checkpointing.stage.writer import Meta


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena-0"


def _stager(path: Path, attempt: int = 1) -> Stager:
    return Stager(path, attempt=attempt, rank=0, world=2)


def _state(value: float, nbytes: int = 3 * PAGE + 5) -> dict[str, object]:
    return {"m": {"w": np.full(nbytes, value, np.uint8), "v": np.full(7, value)}, "n": value}


def _mark(path: Path, step: int, state: UploadState) -> None:
    arena = MappedArena(path)
    slot = next(slot for slot in arena.staged() if slot.step == step)
    arena.headers[slot.index].mark(slot.sequence, state)
    arena.close()


def test_an_absent_or_foreign_file_has_no_slots(path: Path) -> None:
    assert peek(path) == ()
    path.write_bytes(b"")
    assert peek(path) == ()
    path.write_bytes(b"x" * 3 * PAGE)
    assert peek(path) == ()
    with pytest.raises(ArenaInvalid):
        MappedArena(path)
    assert peek(path.parent) == ()


def test_a_prepared_arena_has_room_and_no_slots(path: Path) -> None:
    stager = _stager(path)
    stager.prepare(_state(1), None)
    assert peek(path) == ()
    assert stager.has_room()


def test_what_was_staged_is_described_and_whole(path: Path) -> None:
    stager = _stager(path)
    stager.stage(10, _state(1), {"own": np.arange(3)})
    (staged,) = peek(path)
    assert (staged.step, staged.attempt, staged.rank, staged.world) == (10, 1, 0, 2)
    assert staged.upload_state is UploadState.NONE
    assert abs(staged.staged_at - time.time()) < 60
    arena = MappedArena(path)
    meta = Meta.read(arena, staged.index)
    assert {(e.kind, e.name) for e in meta.extents} == {
        ("replica", "m/w"),
        ("replica", "m/v"),
        ("local", "own"),
    }
    for extent in meta.extents:
        data = arena.data(staged.index)[extent.offset : extent.offset + extent.nbytes]
        assert crc64(data) == extent.crc64
    del data
    arena.close()


def test_two_saves_fit_and_the_third_is_busy_until_the_oldest_is_uploaded(path: Path) -> None:
    stager = _stager(path)
    stager.stage(1, _state(1), None)
    stager.stage(2, _state(2), None)
    assert not stager.has_room()
    with pytest.raises(StageBusy):
        stager.stage(3, _state(3), None)
    _mark(path, 1, UploadState.UPLOADING)
    assert not stager.has_room()
    _mark(path, 2, UploadState.UPLOADED)
    assert not stager.has_room(), "the newest complete slot is never given up"
    _mark(path, 1, UploadState.UPLOADED)
    stager.stage(3, _state(3), None)
    assert [slot.step for slot in peek(path)] == [3, 2]
    assert [slot.upload_state for slot in peek(path)] == [UploadState.NONE, UploadState.UPLOADED]


def test_a_failed_upload_gives_its_slot_to_a_later_save(path: Path) -> None:
    stager = _stager(path)
    stager.stage(1, _state(1), None)
    stager.stage(2, _state(2), None)
    _mark(path, 1, UploadState.FAILED)
    stager.stage(3, _state(3), None)
    assert [slot.step for slot in peek(path)] == [3, 2]


def test_a_later_attempt_finds_the_slots_and_overwrites_the_older_first(path: Path) -> None:
    first = _stager(path)
    first.stage(50, _state(1), None)
    first.stage(60, _state(2), None)
    for step in (50, 60):
        _mark(path, step, UploadState.UPLOADED)
    second = _stager(path, attempt=2)
    second.prepare(_state(3), None)
    assert [slot.step for slot in peek(path)] == [60, 50]
    second.stage(45, _state(3), None)
    assert [(slot.attempt, slot.step) for slot in peek(path)] == [(2, 45), (1, 60)]
    second.stage(50, _state(3), None)
    assert [(slot.attempt, slot.step) for slot in peek(path)] == [(2, 50), (2, 45)]


def test_a_half_written_slot_is_no_slot_and_its_place_is_used_again(path: Path) -> None:
    stager = _stager(path)
    stager.stage(1, _state(1), None)
    stager.stage(2, _state(2), None)
    arena = MappedArena(path)
    torn = arena.staged()[1].index
    arena.headers[torn].record.begin()
    arena.close()
    assert [slot.step for slot in peek(path)] == [2]
    stager.stage(3, _state(3), None)
    assert [slot.step for slot in peek(path)] == [3, 2]


def test_a_state_that_grows_gets_a_larger_arena(path: Path) -> None:
    stager = _stager(path)
    stager.stage(1, _state(1), None)
    stager.stage(2, _state(2, nbytes=50 * PAGE), None)
    assert [slot.step for slot in peek(path)] == [2, 1], "what is not in the store yet is kept"
    _mark(path, 1, UploadState.UPLOADED)
    stager.stage(3, {**_state(2, nbytes=50 * PAGE), "n": "x" * 300_000}, None)
    assert [slot.step for slot in peek(path)] == [3, 2]


def test_too_little_memory_is_refused_with_the_numbers_and_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        admission, "room_for", lambda _: {"/dev/shm": 10_000, "MemAvailable": 10**12}
    )
    with pytest.raises(StageRefused, match=r"needs .* GiB .*/dev/shm has 0\.00 GiB left"):
        _stager(path).prepare(_state(1), None)
    assert list(path.parent.iterdir()) == []


def test_a_full_file_system_is_refused_and_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StageRefused, match="No space left"):
        _stager(path).prepare(_state(1), None)
    assert list(path.parent.iterdir()) == []


def test_memory_that_a_killed_rank_had_taken_is_free_before_room_is_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = path.with_name(f".{path.name}.new")
    left.write_bytes(b"killed between taking memory and giving it a name")
    monkeypatch.setattr(
        admission, "room_for", lambda _: {"/dev/shm": 0 if left.exists() else 10**9}
    )
    _stager(path).prepare(_state(1), None)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_room_for_staging_is_known_here() -> None:
    room = memory.room_for(Path("/dev/shm"))
    assert room["/dev/shm"] > 0
    assert room["MemAvailable"] > 0


def test_the_limit_of_an_outer_cgroup_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "job_7" / "step_0"
    inner.mkdir(parents=True)
    for folder, limit in ((inner, "max"), (inner.parent, "1000000"), (tmp_path, "2000000")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("400000")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_own_cgroup", lambda _: "job_7/step_0")
    assert memory.room_for(Path("/dev/shm"))["cgroup memory.max"] == 601_000
    monkeypatch.setattr(memory, "_own_cgroup", lambda _: "elsewhere")
    assert memory.room_for(Path("/dev/shm"))["cgroup memory.max"] == 1_601_000


STAGE_FOREVER = """
import sys
from pathlib import Path
import numpy as np
from checkpointing.stage.arena import MappedArena, UploadState
from checkpointing.stage.stager import Stager
path, first = Path(sys.argv[1]), int(sys.argv[2])
stager = Stager(path, attempt=first, rank=0, world=1)
step = 0
while True:
    step += 1
    state = {"m": {f"w{i}": np.full(60_000, step % 256, np.uint8) for i in range(20)}, "n": step}
    arena = MappedArena(path) if path.exists() else None
    if arena:
        for slot in arena.staged():
            arena.headers[slot.index].mark(slot.sequence, UploadState.UPLOADED)
        arena.close()
    stager.stage(step, state, None)
    if step == 1:
        print("staged", flush=True)
"""


def test_a_rank_killed_at_any_moment_leaves_whole_slots_only(path: Path) -> None:
    chance = random.Random(7)
    for attempt in range(1, 9):
        process = subprocess.Popen(
            [sys.executable, "-c", STAGE_FOREVER, str(path), str(attempt)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"staged\n"
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        arena = MappedArena(path)
        staged = arena.staged()
        assert staged, "the newest whole slot is never the one written to"
        for slot in staged:
            source = ArenaSource(arena, slot)
            for extent in source.meta.extents:
                held = source._data[extent.offset : extent.offset + extent.nbytes]
                assert crc64(held.data) == extent.crc64
                assert set(held.tolist()) == {slot.step % 256}
        del source, held
        arena.close()
