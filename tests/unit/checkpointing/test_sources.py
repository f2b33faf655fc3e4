"""What is read for a restore, and in how many requests."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from checkpointing import leaves
from checkpointing.boxes import Box, whole
from checkpointing.checksum import crc64
from checkpointing.errors import RestoreFailed
from checkpointing.plan import Extent
from checkpointing.sources import Part, Wanted, fill_from_store
from checkpointing.store.directory import DirectoryStore


class Counting(DirectoryStore):
    """Counts reads."""

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


def put(
    store: Counting, arrays: Sequence[NDArray[np.float64]], *, blocks: bool = True
) -> list[Extent]:
    extents, offset = [], 0
    for n, array in enumerate(arrays):
        data = array.reshape(-1).view(np.uint8)
        sums = [
            crc64(data[at : at + leaves.BLOCK].data) for at in range(0, data.nbytes, leaves.BLOCK)
        ]
        extents.append(
            Extent(
                name=f"t{n}",
                kind="replica",
                owner=0,
                dtype="float64",
                shape=array.shape,
                offset=offset,
                nbytes=data.nbytes,
                crc64=crc64(data.data),
                blocks=tuple(sums) if blocks and len(sums) > 1 else (),
            )
        )
        offset += data.nbytes
    body = b"".join(array.tobytes() for array in arrays)
    store.upload("data", [memoryview(body)], crc64(body))
    return extents


def part(extent: Extent, box: Box) -> Part:
    return Part(extent=extent, key="data", box=box, out=np.zeros(box.shape, "V8"))


def values(part: Part) -> NDArray[np.float64]:
    return np.ascontiguousarray(part.out).view(np.float64).reshape(part.box.shape)


def test_parts_of_many_small_tensors_are_one_read(store: Counting) -> None:
    arrays = [np.random.default_rng(n).random((8, 6)) for n in range(50)]
    extents = put(store, arrays)
    box = Box((2, 1), (3, 4))
    parts = [part(extent, box) for extent in extents[::2]]  # small gaps are read along
    fill_from_store(store, [], parts)
    assert len(store.reads) == 1
    for found, array in zip(parts, arrays[::2], strict=True):
        assert np.array_equal(values(found), array[box.slices()])


def test_a_large_gap_is_not_read(store: Counting) -> None:
    arrays = [np.ones(10), np.ones(1 << 19), np.ones(10)]
    extents = put(store, arrays)
    wanted = [Wanted(extent=extents[n], key="data", out=np.zeros(80, np.uint8)) for n in (0, 2)]
    fill_from_store(store, wanted)
    assert sorted(nbytes for _, nbytes in store.reads) == [80, 80]


def test_a_part_that_is_a_whole_large_extent_is_read_straight_into_place(store: Counting) -> None:
    array = np.random.default_rng(1).random((3000, 1000))
    (extent,) = put(store, [array])
    target = part(extent, whole(array.shape))
    fill_from_store(store, [], [target])
    assert sum(nbytes for _, nbytes in store.reads) == array.nbytes
    assert np.array_equal(values(target), array)


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "one CRC"])
def test_parts_of_a_large_tensor_are_verified_with_and_without_blocks(
    store: Counting, blocks: bool
) -> None:
    array = np.random.default_rng(1).random((3000, 1000))
    (extent,) = put(store, [array], blocks=blocks)
    boxes = [Box((0, 0), (10, 1000)), Box((2500, 0), (500, 300)), Box((7, 999), (1, 1))]
    parts = [part(extent, box) for box in boxes]
    fill_from_store(store, [], parts)
    for found in parts:
        assert np.array_equal(values(found), array[found.box.slices()])
    read = sum(nbytes for _, nbytes in store.reads)
    assert read <= array.nbytes if not blocks else read <= 3 * leaves.BLOCK


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "one CRC"])
@pytest.mark.parametrize("rows", [2, 3000], ids=["small", "large"])
def test_a_flipped_byte_in_a_part_is_found(store: Counting, rows: int, blocks: bool) -> None:
    array = np.random.default_rng(1).random((rows, 1000))
    (extent,) = put(store, [array], blocks=blocks)
    path = store._root / "data"
    raw = bytearray(path.read_bytes())
    raw[1500] ^= 1
    path.write_bytes(raw)
    with pytest.raises(RestoreFailed, match="t0: its bytes in data fail their CRC"):
        fill_from_store(store, [], [part(extent, Box((0, 0), (1, 500)))])
