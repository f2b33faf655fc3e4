"""How much memory an arena takes, what is refused, and what gives way when there is little."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from checkpointing.checksum import crc64
from checkpointing.errors import StageBusy, StageRefused
from checkpointing.sources import ArenaSource
from checkpointing.stage import admission, memory, writer
from checkpointing.stage.arena import MappedArena, UploadState, peek
from checkpointing.stage.stager import Stager

MIB = 1 << 20
SPARE = 200 << 10  # headers and room for Python values


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena-0"


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the memory of the node; what the arenas of a folder hold is taken from it."""

    def give(nbytes: int) -> None:
        def left(folder: Path) -> dict[str, int]:
            used = sum(p.stat().st_size for p in folder.iterdir())
            return {"the node": nbytes - used}

        monkeypatch.setattr(admission, "room_for", left)

    return give


def stager(path: Path, rank: int = 0, local_world: int = 1) -> Stager:
    return Stager(path, attempt=1, rank=rank, world=4, local_world=local_world)


def state(value: int, mib: int = 1) -> dict[str, object]:
    return {"w": np.full(mib * MIB, value, np.uint8)}


def mark(path: Path, state: UploadState, *steps: int) -> None:
    arena = MappedArena(path)
    for slot in arena.staged():
        if slot.step in steps:
            arena.headers[slot.index].mark(slot.sequence, state)
    arena.close()


def content(path: Path) -> dict[int, set[int]]:
    """The bytes of each snapshot, all of its CRCs checked."""
    arena = MappedArena(path)
    found = {}
    for slot in arena.staged():
        source = ArenaSource(arena, slot)
        (extent,) = source.meta.extents
        held = source._data[extent.offset : extent.offset + extent.nbytes].copy()
        assert crc64(held.data) == extent.crc64
        found[slot.step] = set(np.unique(held).tolist())
        del source
    arena.close()
    return found


def test_where_two_copies_do_not_fit_one_is_kept(
    path: Path, room: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    room(MIB + SPARE)
    one = stager(path)
    one.prepare(state(1), None)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "one copy is kept" in record.getMessage()
    assert path.stat().st_size < MIB + SPARE
    one.stage(1, state(1), None)
    assert not one.has_room()
    with pytest.raises(StageBusy):
        one.stage(2, state(2), None)
    mark(path, UploadState.UPLOADING, 1)
    assert not one.has_room(replace=True), "what is being sent is not torn"
    mark(path, UploadState.UPLOADED, 1)
    one.stage(2, state(2), None)
    assert content(path) == {2: {2}}
    mark(path, UploadState.FAILED, 2)
    one.stage(3, state(3), None)
    assert content(path) == {3: {3}}
    again = stager(path)
    again.prepare(state(1), None)
    assert content(path) == {3: {3}}, "the next attempt finds it"


def test_less_than_one_copy_is_refused_with_all_numbers(
    path: Path, room: Callable[[int], None]
) -> None:
    room(8 * MIB)
    with pytest.raises(StageRefused, match=r"needs 0\.0. GiB.* 0\.01 GiB for one copy; the node"):
        stager(path).prepare(state(1, mib=10), None)
    assert list(path.parent.iterdir()) == []


def test_the_ranks_of_a_node_have_to_fit_together(
    tmp_path: Path, room: Callable[[int], None]
) -> None:
    """Each alone would fit twice, all four would not, and one copy of each does."""
    room(4 * (MIB + SPARE))
    for rank in range(4):
        own = stager(tmp_path / f"arena-{rank}", rank, local_world=4)
        own.prepare(state(rank), None)
        own.stage(1, state(rank), None)
        assert not own.has_room(), "one slot each"
    assert all(content(tmp_path / f"arena-{rank}") == {1: {rank}} for rank in range(4))


def test_ranks_that_do_not_fit_together_are_refused_before_the_first_takes_its_memory(
    tmp_path: Path, room: Callable[[int], None]
) -> None:
    room(3 * (MIB + SPARE))
    with pytest.raises(StageRefused, match="the states of 4 ranks of this node"):
        stager(tmp_path / "arena-0", 0, local_world=4).prepare(state(1), None)
    assert list(tmp_path.iterdir()) == []


def test_ranks_measure_and_take_one_after_the_other(
    tmp_path: Path, room: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    room(64 * MIB)
    inside, most = [0], [0]
    real = writer._take

    def slow(*args: object) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.03)
        real(*args)  # type: ignore[arg-type]
        inside[0] -= 1

    monkeypatch.setattr(writer, "_take", slow)
    threads = [
        threading.Thread(
            target=stager(tmp_path / f"arena-{n}", n, 3).prepare, args=(state(n), None)
        )
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert len(list(tmp_path.glob("arena-*"))) == 3


def test_growing_keeps_what_is_not_sent(path: Path, room: Callable[[int], None]) -> None:
    room(64 * MIB)
    growing = stager(path)
    growing.stage(1, state(1), None)
    growing.stage(2, state(2), None)
    mark(path, UploadState.UPLOADED, 1)
    growing.stage(3, state(3, mib=4), None)
    assert content(path) == {3: {3}, 2: {2}}
    states = {slot.step: slot.upload_state for slot in peek(path)}
    assert states == {2: UploadState.NONE, 3: UploadState.NONE}


def test_growing_is_refused_before_the_old_copies_are_given_up(
    path: Path, room: Callable[[int], None]
) -> None:
    room(8 * MIB)
    growing = stager(path)
    growing.stage(1, state(1), None)
    growing.stage(2, state(2), None)
    with pytest.raises(StageRefused, match="the node has"):
        growing.stage(3, state(3, mib=20), None)
    assert content(path) == {1: {1}, 2: {2}}
    mark(path, UploadState.UPLOADED, 1)
    growing.stage(4, state(4), None)
    assert content(path) == {2: {2}, 4: {4}}


def test_growing_waits_for_the_uploads_before_it_gives_up_the_old_copies(
    path: Path, room: Callable[[int], None]
) -> None:
    room(9 * MIB)  # the new two copies fit only without the old two
    growing = stager(path)
    growing.stage(1, state(1), None)
    growing.stage(2, state(2), None)
    sent = threading.Timer(0.1, mark, (path, UploadState.UPLOADED, 1, 2))
    sent.start()
    growing.stage(3, state(3, mib=4), None)
    sent.join()
    assert content(path) == {3: {3}}
    assert growing.has_room(), "two slots"


def test_what_is_never_sent_is_given_up_only_when_nothing_else_fits_and_that_is_said(
    path: Path,
    room: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(writer, "_UNSENT_S", 0.05)
    room(8 * MIB)
    growing = stager(path)
    growing.stage(1, state(1), None)
    growing.stage(2, state(2), None)
    with pytest.raises(StageBusy):
        growing.stage(3, state(3, mib=3), None)
    assert content(path) == {2: {2}}, "beside the old copies only one has room"
    assert "given up before their upload: steps [1]" in caplog.text
    mark(path, UploadState.UPLOADED, 2)
    growing.stage(3, state(3, mib=3), None)
    assert content(path) == {3: {3}}
    growing.stage(4, state(4, mib=6), None)
    assert content(path) == {4: {4}}
    assert "given up before their upload: steps [3]" in caplog.text


def test_control_groups_of_version_1_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "memory"
    inner = root / "slurm" / "job_7"
    inner.mkdir(parents=True)
    for folder, limit in ((inner, 2**63 - 4096), (inner.parent, 1_000_000), (root, 5_000_000)):
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text("400000\n")
        (folder / "memory.stat").write_text("inactive_file 5\ntotal_inactive_file 1000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    text = "9:name=systemd:/\n4:cpu,memory:/slurm/job_7\n0::/\n"
    real = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda self, *a, **k: text if str(self) == "/proc/self/cgroup" else real(self, *a, **k),
    )
    assert memory.room_for(Path("/dev/shm"))["cgroup memory.limit_in_bytes"] == 601_000


def test_a_dropped_unsent_copy_is_told(path: Path) -> None:
    replacing = stager(path)
    assert replacing.stage(1, state(1), None, replace=True) is None
    assert replacing.stage(2, state(2), None, replace=True) is None
    dropped = replacing.stage(3, state(3), None, replace=True)
    assert dropped is not None
    assert dropped.step == 1
    mark(path, UploadState.UPLOADING, 2)
    dropped = replacing.stage(4, state(4), None, replace=True)
    assert dropped is not None
    assert dropped.step == 3, "the older one is on its way"
    assert content(path) == {2: {2}, 4: {4}}
    mark(path, UploadState.UPLOADING, 2, 4)
    assert not replacing.has_room(replace=True)
    mark(path, UploadState.UPLOADED, 2)
    assert replacing.stage(5, state(5), None, replace=True) is None, "sent, not dropped"


def test_the_arena_is_made_of_memory_that_is_there(path: Path) -> None:
    stager(path).prepare(state(1, mib=3), None)
    stat = path.stat()
    assert stat.st_blocks * 512 >= stat.st_size
