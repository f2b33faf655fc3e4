"""Saved by one world, restored by another: the same bits, whatever the shapes and layouts."""

import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from checkpointing import leaves
from checkpointing.boxes import Box, split
from checkpointing.commit import UploadRecord, commit
from checkpointing.content import content_sha256
from checkpointing.errors import CommitRefused, RestoreFailed
from checkpointing.restore import Point, restore_from_memory, restore_from_store
from checkpointing.sharded import Sharded
from checkpointing.stage.arena import MappedArena
from checkpointing.stage.stager import Stager
from checkpointing.store.directory import DirectoryStore
from checkpointing.uploader.send import send

DTYPES = ("float32", "float16", "int64", "uint8", "complex64", "bool")
Grid = tuple[int, ...]
"""Into how many pieces each dimension is cut; the rest of the world holds copies."""


@dataclass(frozen=True)
class Tensor:
    name: str
    data: NDArray

    def boxes(self, grid: Grid) -> list[Box]:
        cuts = [split(n, parts) for n, parts in zip(self.data.shape, grid, strict=True)]
        return [Box(tuple(a for a, _ in c), tuple(n for _, n in c)) for c in product(*cuts)]

    def piece(self, grid: Grid, rank: int, world: int, *, empty: bool) -> Sharded:
        boxes = self.boxes(grid)
        box = boxes[rank % len(boxes)]
        local = np.asarray(self.data[box.slices()])
        holders = [r for r in range(world) if r % len(boxes) == rank % len(boxes)]
        return Sharded(
            local=np.zeros_like(local) if empty else local.copy(),
            shape=self.data.shape,
            start=box.start,
            copy=holders.index(rank),
            copies=len(holders),
        )


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    found = []
    for n in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        raw = rng.integers(0, 100, shape)
        found.append(Tensor(f"t{n}", np.asarray(raw).astype(draw(st.sampled_from(DTYPES)))))
    return found


@st.composite
def layouts(draw: st.DrawFn, found: list[Tensor], world: int) -> list[Grid]:
    """A grid per tensor with at most `world` pieces, or () for a tensor that all have whole."""
    grids = []
    for tensor in found:
        grid: list[int] = []
        for _ in tensor.data.shape:
            used = int(np.prod(grid)) if grid else 1
            grid.append(draw(st.integers(1, max(1, world // used))))
        grids.append(tuple(grid))
    return grids


class Bench:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        (self.folder / "store").mkdir()
        self.store = DirectoryStore(self.folder / "store")

    def state(
        self, found: list[Tensor], grids: list[Grid], rank: int, world: int, *, empty: bool
    ) -> dict[str, object]:
        pairs = zip(found, grids, strict=True)
        model = {t.name: t.piece(grid, rank, world, empty=empty) for t, grid in pairs}
        return {"model": model, "epoch": 0 if empty else 7}

    def saves(self, found: list[Tensor], grids: list[Grid], world: int, step: int = 5) -> None:
        records = []
        for rank in range(world):
            path = self.folder / f"arena-{step}-{rank}"
            stager = Stager(path, attempt=1, rank=rank, world=world)
            stager.stage(step, self.state(found, grids, rank, world, empty=False), None)
            arena = MappedArena(path)
            sent = send(self.store, "run", arena, arena.staged()[0])
            arena.close()
            crc = sent.index_crc64
            records.append(UploadRecord(rank=rank, index_key=sent.index_key, index_crc64=crc))
        assert commit(self.store, "run", step, 1, records, world, "w").committed

    def check(self, found: list[Tensor], grids: list[Grid], world: int) -> None:
        for rank in range(world):
            state = self.state(found, grids, rank, world, empty=True)
            point = Point(step=5, attempt=1)
            restore_from_store(self.store, "run", point, rank, world, state, None)
            assert state["epoch"] == 7
            wanted = self.state(found, grids, rank, world, empty=False)
            for tensor in found:
                got, want = state["model"][tensor.name], wanted["model"][tensor.name]  # type: ignore[index]
                assert got.local.tobytes() == want.local.tobytes()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_world_restores_what_any_other_saved(data: st.DataObject) -> None:
    found = data.draw(tensors())
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        world = data.draw(st.integers(1, 4), label="world")
        bench.saves(found, data.draw(layouts(found, world)), world)
        for _ in range(2):
            other = data.draw(st.integers(1, 6), label="other world")
            bench.check(found, data.draw(layouts(found, other)), other)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_the_sum_of_a_checkpoint_does_not_depend_on_its_layout(data: st.DataObject) -> None:
    found = data.draw(tensors())
    sums = []
    for world in (1, data.draw(st.integers(1, 4))):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(folder)
            bench.saves(found, data.draw(layouts(found, world)), world)
            sums.append(content_sha256(bench.store, "run", 5))
    assert sums[0] == sums[1]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(str(tmp_path))


BIG = Tensor("t0", np.arange(3_000_000, dtype=np.float64).reshape(3000, 1000))


def test_a_part_of_a_large_piece_is_read_by_its_blocks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaves, "BLOCK", 1 << 20)
    monkeypatch.setattr("checkpointing.sources.BLOCK", 1 << 20)
    bench.saves([BIG], [(2, 1)], 2)
    bench.check([BIG], [(3, 2)], 6)
    bench.check([BIG], [(1, 1)], 1)


def test_one_flipped_byte_in_a_part_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "BLOCK", 1 << 20)
    monkeypatch.setattr("checkpointing.sources.BLOCK", 1 << 20)
    bench.saves([BIG], [(2, 1)], 2)
    (path,) = (bench.folder / "store").rglob("rank-00001.bin")
    raw = bytearray(path.read_bytes())
    raw[5_000_000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(RestoreFailed, match=r"t0.*fail their CRC"):
        bench.check([BIG], [(3, 1)], 3)


def test_a_tensor_of_all_is_restored_as_pieces_and_back(bench: Bench) -> None:
    data = np.arange(24.0).reshape(6, 4)
    stager = Stager(bench.folder / "arena", attempt=1, rank=0, world=1)
    stager.stage(5, {"model": {"w": data}}, None)
    arena = MappedArena(bench.folder / "arena")
    sent = send(bench.store, "run", arena, arena.staged()[0])
    record = UploadRecord(rank=0, index_key=sent.index_key, index_crc64=sent.index_crc64)
    commit(bench.store, "run", 5, 1, [record], 1, "w")
    half = Sharded(local=np.zeros((3, 4)), shape=(6, 4), start=(3, 0))
    point = Point(step=5, attempt=1)
    restore_from_store(bench.store, "run", point, 1, 2, {"model": {"w": half}}, None)
    assert np.array_equal(half.local, data[3:])
    bench.saves([Tensor("w", data)], [(2, 1)], 2, step=6)
    state = {"model": {"w": np.zeros((6, 4))}, "epoch": 0}
    restore_from_store(bench.store, "run", Point(step=6, attempt=1), 0, 1, state, None)
    assert np.array_equal(state["model"]["w"], data)  # type: ignore[index]


def test_pieces_come_back_from_memory_in_the_same_world(bench: Bench) -> None:
    found, grids = [BIG], [(2, 1)]
    bench.saves(found, grids, 2)
    state = bench.state(found, grids, 1, 2, empty=True)
    path = bench.folder / "arena-5-1"
    restore_from_memory(path, Point(step=5, attempt=1), 1, 2, state, None)
    assert np.array_equal(state["model"]["t0"].local, BIG.data[1500:])  # type: ignore[index]


def commits(bench: Bench, *pieces: Sharded) -> None:
    records = []
    for rank, piece in enumerate(pieces):
        path = bench.folder / f"arena-{rank}"
        stager = Stager(path, attempt=1, rank=rank, world=len(pieces))
        stager.stage(5, {"w": piece}, None)
        arena = MappedArena(path)
        sent = send(bench.store, "run", arena, arena.staged()[0])
        crc = sent.index_crc64
        records.append(UploadRecord(rank=rank, index_key=sent.index_key, index_crc64=crc))
    commit(bench.store, "run", 5, 1, records, len(pieces), "w")


def piece(start: int, length: int, value: float = 1.0, **more: int) -> Sharded:
    return Sharded(local=np.full(length, value), shape=(8,), start=(start,), **more)


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ((piece(0, 4), piece(5, 3)), "7 of 8 elements"),
        ((piece(0, 4), piece(3, 5)), "9 of 8 elements"),
        ((piece(0, 4), piece(2, 4)), "overlap"),
        ((piece(0, 8), piece(0, 8, 2.0)), "content differs"),
        ((piece(0, 8), piece(0, 8, 2.0, copy=1, copies=2)), "content differs"),
        ((piece(0, 8, copies=2), piece(0, 8, copies=2)), "uploaded by nobody"),
    ],
)
def test_pieces_that_make_no_whole_are_refused(
    bench: Bench, pieces: tuple[Sharded, ...], why: str
) -> None:
    with pytest.raises(CommitRefused, match=why):
        commits(bench, *pieces)


def test_a_piece_on_two_meshes_that_do_not_know_each_other_counts_once(bench: Bench) -> None:
    commits(bench, piece(0, 8), piece(0, 8))
    state = {"w": piece(0, 8, 0.0)}
    restore_from_store(bench.store, "run", Point(step=5, attempt=1), 0, 1, state, None)
    assert state["w"].local.tolist() == [1.0] * 8


def test_ranks_that_all_call_their_experts_by_the_same_numbers_are_refused(bench: Bench) -> None:
    """One rank's experts would be saved, and the others' be lost in silence."""
    with pytest.raises(CommitRefused, match="w at"):
        commits(bench, piece(0, 4, 1.0), piece(0, 4, 2.0))


def test_a_piece_that_nobody_asked_for_is_no_piece() -> None:
    with pytest.raises(ValueError, match="beyond"):
        piece(6, 4)
    with pytest.raises(ValueError, match="copy 2 of 2"):
        piece(0, 4, copy=2, copies=2)
