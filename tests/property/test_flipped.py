"""One byte of anything that is kept, flipped: found, named, fallen back from; never believed."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointing.deletion import delete_commit, finish_deletions
from checkpointing.errors import CheckpointingError, NothingUsable, RestoreFailed
from checkpointing.quarantine import list_quarantined, quarantine
from checkpointing.resolver import find_commit, list_commits
from checkpointing.restore import Point, restore_from_memory, restore_from_store
from checkpointing.sharded import Sharded
from checkpointing.stage.arena import MappedArena, UploadState, peek
from checkpointing.stage.meta import Meta
from checkpointing.stage.stager import Stager
from checkpointing.store.directory import DirectoryStore
from checkpointing.uploader.watch import Watcher
from checkpointing.verify import verify
from tests.unit.checkpointing.saved import save, store_at

WORLD = 2
DTYPES = ("float32", "int16", "bool", "complex64")


@dataclass(frozen=True)
class States:
    """What the ranks of a run hold: the same structure at every step, other content."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    text: str

    def at(self, step: int, rank: int) -> dict[str, Any]:
        rng = np.random.default_rng(step)
        pairs = zip(self.shapes, self.dtypes, strict=True)
        model = {f"t{n}": rng.integers(1, 99, s).astype(d) for n, (s, d) in enumerate(pairs)}
        rows = np.full((2, 3), 10.0 * step + rank)
        whole = (2 * WORLD, 3)
        return {
            "model": model,
            "experts": Sharded(local=rows, shape=whole, start=(2 * rank, 0)),
            "notes": {"text": self.text, "step": step, "raw": self.text.encode()},
        }


@st.composite
def states(draw: st.DrawFn) -> States:
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=3))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=len(shapes), max_size=len(shapes)))
    return States(tuple(shapes), tuple(dtypes), draw(st.text(max_size=5)))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    arrays = [np.array_equal(found["model"][n], wanted["model"][n]) for n in wanted["model"]]
    held = np.array_equal(found["experts"].local, wanted["experts"].local)
    return all(arrays) and held and found["notes"] == wanted["notes"]


def restore_newest(store: DirectoryStore, kept: States) -> int:
    """Restore as ranks and supervisor do: what fails is put aside and the one before it taken."""
    for commit in list_commits(store, "run"):
        try:
            for rank in range(WORLD):
                found = kept.at(99, rank)
                local = {"rng": np.zeros(4, np.int64)}
                place = Point(step=commit.step, attempt=commit.attempt)
                restore_from_store(store, "run", place, rank, WORLD, found, local)
                assert same(found, kept.at(commit.step, rank))
                assert local["rng"].tolist() == [rank] * 4
        except RestoreFailed as error:
            quarantine(store, "run", *commit.place, why=str(error), who="test")
            continue
        return commit.step
    raise AssertionError("nothing to restore")


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(states(), st.data())
def test_any_byte_of_any_stored_object(kept: States, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = store_at(Path(name))
        for step in (1, 2):
            save(store, "run", step, state=lambda rank, step=step: kept.at(step, rank), world=WORLD)
        objects = [info for info in store.list("run/") if "step-000000000002" in info.key]
        assert len(objects) == 2 * WORLD + 1
        for info in objects:
            path, bit = Path(name) / info.key, data.draw(st.integers(0, 7))
            content = bytearray(path.read_bytes())
            at = data.draw(st.integers(0, 9999)) * len(content) // 10_000
            content[at] ^= 1 << bit
            path.write_bytes(content)
            problems = " ".join(verify(store, find_commit(store, "run", 2)).problems)
            assert path.name in problems
            # An index of another rank tells this one nothing: both ranks are restored.
            assert restore_newest(store, kept) == 1
            for record in list_quarantined(store, "run"):
                assert path.name in record.why or "CRC" in record.why
                (Path(name) / f"run/quarantine/{_place(2)}.json").unlink()
            content[at] ^= 1 << bit
            path.write_bytes(content)
        assert restore_newest(store, kept) == 2


def _place(step: int) -> str:
    return f"step-{step:012d}-attempt-0001"


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_byte_of_a_quarantine_record_still_keeps_its_checkpoint_out(
    data: st.DataObject,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = store_at(Path(name))
        save(store, "run", 1)
        save(store, "run", 2)
        quarantine(store, "run", 2, 1, why="spoilt", who="test")
        path = Path(name) / f"run/quarantine/{_place(2)}.json"
        flip(path, data)
        assert [commit.step for commit in list_commits(store, "run")] == [1]
        (record,) = list_quarantined(store, "run")
        assert record.place == (2, 1)
        assert "cannot be read" in record.why


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_byte_of_the_note_of_a_deletion_deletes_nothing_else(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = store_at(Path(name))
        save(store, "run", 1)
        outcome = save(store, "run", 2)
        packed = store.get(outcome.manifest_key)
        store.put_if_absent(f"run/deleting/{_place(2)}.json", packed)
        store.delete(outcome.manifest_key)  # killed here
        flip(Path(name) / f"run/deleting/{_place(2)}.json", data)
        before = [info.key for info in store.list("run/data/")]
        assert finish_deletions(store, "run") == ()
        assert [info.key for info in store.list("run/data/")] == before
        assert [commit.step for commit in list_commits(store, "run")] == [1]
        with pytest.raises(CheckpointingError):
            delete_commit(store, "run", 2, 1)
        Path(name, outcome.manifest_key).write_bytes(b"spoilt")
        Path(name, f"run/commits/{_place(1)}.json").write_bytes(b"spoilt")
        with pytest.raises(NothingUsable):
            list_commits(store, "run")


def flip(path: Path, data: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, 9999)) * len(content) // 10_000  # its length is not always one
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)


def of_arena(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full(5, float(step))}, "n": step}


@pytest.fixture(scope="module", params=[UploadState.NONE, UploadState.UPLOADING])
def arena(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, bytes]:
    path = folder / f"{request.param}" / "arena-0"
    path.parent.mkdir()
    stager = Stager(path, attempt=1, rank=0, world=1)
    for step in (1, 2):
        stager.stage(step, of_arena(step), {"x": np.ones(2)})
    mapped = MappedArena(path)
    for staged in mapped.staged():
        mapped.headers[staged.index].mark(staged.sequence, request.param)
    mapped.close()
    return path, path.read_bytes()


def places(path: Path) -> list[int]:
    """Every byte of an arena that means something."""
    mapped = MappedArena(path)
    spans = [(0, 40)]
    for staged in mapped.staged():
        index, capacities = staged.index, mapped.capacities
        spans += [
            (4096 * (1 + index), 160),
            (capacities.meta_at(index), mapped.headers[index].meta()[0]),
        ]
        start = capacities.data_at(index)
        spans += [(start + e.offset, e.nbytes) for e in Meta.read(mapped, index).extents]
    mapped.close()
    return [at for start, length in spans for at in range(start, start + length)]


def test_any_byte_of_an_arena(arena: tuple[Path, bytes]) -> None:
    path, whole = arena
    path.write_bytes(whole)
    found, seen = places(path), 0
    for number, at in enumerate(found):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1 << number % 8]))
        for slot in peek(path):
            assert (slot.step, slot.attempt) in ((1, 1), (2, 1))
        for step in (1, 2):
            state, local = of_arena(0), {"x": np.zeros(2)}
            try:
                restore_from_memory(path, Point(step=step, attempt=1), 0, 1, state, local)
            except RestoreFailed:
                seen += 1
            else:
                assert state["n"] == step
                assert (state["model"]["w"] == step).all()
        with path.open("r+b") as file:
            file.seek(at)
            file.write(whole[at : at + 1])
    assert seen > len(found) // 2, "spare words and the upload state are no content"


def test_an_uploader_lives_through_any_byte_of_an_arenas_headers(
    arena: tuple[Path, bytes], tmp_path: Path
) -> None:
    path, whole = arena
    words = [*range(8), *range(64, 64 + 80)]  # of a header page
    for at in (*range(40), *(page + at for page in (4096, 8192) for at in words)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        store = store_at(tmp_path / f"store-{at}")
        watcher = Watcher(path.parent, store, "run", lambda _: True)
        watcher.poll()
        watcher._pool.shutdown()
        for future in watcher._running.values():
            future.result()
        for info in store.list("run/"):
            assert "step-00000000000" in info.key, "nothing that was never staged"
    path.write_bytes(whole)
