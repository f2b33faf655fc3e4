"""Which bytes of an object are asked for together, and where they go."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from checkpointing.boxes import Box
from checkpointing.checksum import crc64
from checkpointing.errors import RestoreFailed
from checkpointing.plan import Extent
from checkpointing.restore import Point, restore_from_memory
from checkpointing.sources import Part, Wanted, fill_from_store
from checkpointing.stage.crew import Crew
from checkpointing.stage.stager import Stager
from checkpointing.store.directory import DirectoryStore

MIB = 1 << 20


class Counting(DirectoryStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[int, int]] = []

    def read_each(
        self, key: str, offset: int, outs: Sequence[memoryview], arrived: Callable[[int], None]
    ) -> None:
        self.reads.append((offset, sum(out.nbytes for out in outs)))
        super().read_each(key, offset, outs, arrived)


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


def put(store: Counting, sizes: Sequence[int]) -> tuple[bytes, list[Extent]]:
    body = np.random.default_rng(3).integers(0, 256, sum(sizes), np.uint8).tobytes()
    store.upload("data", [memoryview(body)], crc64(body))
    extents, offset = [], 0
    for number, size in enumerate(sizes):
        extents.append(
            Extent(
                name=f"t{number}",
                kind="replica",
                owner=0,
                dtype="uint8",
                shape=(size,),
                offset=offset,
                nbytes=size,
                crc64=crc64(body[offset : offset + size]),
            )
        )
        offset += size
    return body, extents


def wanted(extents: Sequence[Extent]) -> list[Wanted]:
    return [Wanted(extent=e, key="data", out=np.zeros(e.nbytes, np.uint8)) for e in extents]


def test_neighbours_of_all_sizes_share_requests_of_bounded_length(store: Counting) -> None:
    sizes = [3000, 20 * MIB, 17, 9 * MIB + 1, 5, 300 << 10, 40 * MIB, 1]
    body, extents = put(store, sizes)
    items = wanted(extents)
    fill_from_store(store, items)
    assert b"".join(item.out.tobytes() for item in items) == body
    assert sum(nbytes for _, nbytes in store.reads) == len(body), "nothing is read twice"
    assert max(nbytes for _, nbytes in store.reads) <= 32 * MIB
    assert len(store.reads) == 3


def test_what_is_asked_for_twice_comes_twice(store: Counting) -> None:
    body, extents = put(store, [100, 2 * MIB, 200])
    items = wanted([*extents, *extents])
    fill_from_store(store, items)
    assert b"".join(item.out.tobytes() for item in items) == body + body


def test_parts_and_whole_extents_are_read_together(store: Counting) -> None:
    body, extents = put(store, [1000, 2 * MIB, 1000])
    parts = [
        Part(extent=extents[n], key="data", box=Box((10,), (20,)), out=np.zeros(20, "V1"))
        for n in (0, 2)
    ]
    items = wanted(extents[1:2])
    fill_from_store(store, items, parts)
    assert len(store.reads) == 1
    assert items[0].out.tobytes() == body[1000 : 1000 + 2 * MIB]
    assert parts[0].out.tobytes() == body[10:30]
    assert parts[1].out.tobytes() == body[-990:-970]


@pytest.mark.parametrize("at", [0, 1000, 1000 + 40 * MIB, 1000 + 41 * MIB])
def test_a_flipped_byte_anywhere_is_found_and_named(store: Counting, at: int) -> None:
    _, extents = put(store, [1000, 41 * MIB, 900])
    with (store._root / "data").open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 8]))
    number = 0 if at < 1000 else 1 if at < 1000 + 41 * MIB else 2
    with pytest.raises(RestoreFailed, match=f"t{number}: its bytes in data fail their CRC"):
        fill_from_store(store, wanted(extents))


@pytest.mark.parametrize("threads", [1, 3])
def test_leaves_that_share_memory_are_not_both_right(tmp_path: Path, threads: int) -> None:
    arena, point = tmp_path / "arena-0", Point(step=1, attempt=1)
    saved = {"a": np.arange(4000.0), "b": np.arange(4000.0) + 5, "c": np.ones(5 * MIB)}
    stager = Stager(arena, attempt=1, rank=0, world=1)
    stager.stage(1, saved, None)
    mapped = stager.arena()
    assert mapped is not None
    room = np.zeros(4001)
    apart = {"a": np.zeros(4000), "b": np.zeros(4000), "c": np.zeros(5 * MIB)}
    restore_from_memory(mapped, point, 0, 1, apart, None, Crew(threads))
    assert all(np.array_equal(apart[name], saved[name]) for name in saved)
    shared = {**apart, "a": room[:4000], "b": room[1:]}
    with pytest.raises(RestoreFailed, match=r"the state changed it|fail their CRC"):
        restore_from_memory(mapped, point, 0, 1, shared, None, Crew(threads))
