"""Of a large tensor that all ranks have alike, a rank that wants a part reads the blocks of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointing import columns, keys, leaves
from checkpointing.commit import UploadRecord, commit
from checkpointing.errors import CommitRefused, RestoreFailed
from checkpointing.extents import Extent, Extents
from checkpointing.manifest import Manifest, read_index, read_manifest
from checkpointing.restore import Point, restore_from_store
from checkpointing.sealed import seal, unseal
from checkpointing.sharded import Sharded
from checkpointing.stage.arena import MappedArena
from checkpointing.stage.stager import Stager
from checkpointing.store.directory import DirectoryStore
from checkpointing.uploader.send import send

BLOCK = leaves.BLOCK
ROWS, WIDTH = 10, 1 << 20
WHOLE = np.random.default_rng(3).integers(0, 99, (ROWS, WIDTH), dtype=np.int32)  # 2.5 blocks
POINT = Point(step=5, attempt=1)
KEY = keys.manifest_key("run", 5, 1)


class Counting(DirectoryStore):
    """Counts the bytes of data that are asked for."""

    asked = 0

    def read_each(
        self, key: str, offset: int, outs: Sequence[memoryview], arrived: Callable[[int], None]
    ) -> None:
        self.asked += sum(out.nbytes for out in outs)
        super().read_each(key, offset, outs, arrived)


def saved(store: DirectoryStore, folder: Path, world: int = 1) -> list[UploadRecord]:
    records = []
    for rank in range(world):
        stager = Stager(folder / f"arena-{rank}", attempt=1, rank=rank, world=world)
        stager.stage(5, {"w": WHOLE, "small": np.arange(4)}, {"own": np.zeros(BLOCK + 8, "u1")})
        arena = MappedArena(folder / f"arena-{rank}")
        sent = send(store, "run", arena, arena.staged()[0])
        arena.close()
        crc = sent.index_crc64
        records.append(UploadRecord(rank=rank, index_key=sent.index_key, index_crc64=crc))
    return records


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    (tmp_path / "store").mkdir()
    store = Counting(tmp_path / "store")
    assert commit(store, "run", 5, 1, saved(store, tmp_path), 1, "w").committed
    return store


def rows_of(store: Counting, first: int, count: int) -> Any:
    local = np.zeros((count, WIDTH), np.int32)
    piece = Sharded(local=local, shape=WHOLE.shape, start=(first, 0))
    state = {"w": piece, "small": np.zeros(4, np.int64)}
    store.asked = 0
    restore_from_store(store, "run", POINT, 0, 4, state, None)
    return local


@pytest.mark.parametrize(
    ("first", "count", "blocks"), [(0, 4, 1), (1, 2, 1), (3, 2, 2), (8, 2, 0.5), (0, 9, 2.5)]
)
def test_no_more_than_its_blocks_are_read_of_a_part(
    store: Counting, first: int, count: int, blocks: float
) -> None:
    found = rows_of(store, first, count)
    assert np.array_equal(found, WHOLE[first : first + count])
    assert store.asked == blocks * BLOCK + 32  # and the small tensor


def test_a_flipped_byte_is_found_by_who_reads_its_block(store: Counting, tmp_path: Path) -> None:
    path = tmp_path / "store" / keys.data_key("run", 5, 1, 0)
    raw = bytearray(path.read_bytes())
    (extent,) = (e for e in read_manifest(store, KEY).tensors if e.name == "w")
    raw[extent.offset + BLOCK + 100] ^= 1
    path.write_bytes(raw)
    assert np.array_equal(rows_of(store, 0, 4), WHOLE[:4])
    with pytest.raises(RestoreFailed, match=r"w: its bytes in .* fail their CRC"):
        rows_of(store, 4, 1)


def test_what_was_written_without_sums_of_blocks_is_read_whole(store: Counting) -> None:
    """In the second format only pieces have them."""
    found = unseal(store.get(KEY), "everstep-manifest/3")
    found["tensors"] = columns.to_json(
        Extents.of([replace(e, blocks=()) for e in read_manifest(store, KEY).tensors])
    )
    assert found["tensors"]["blocks"] == ""
    old = seal("everstep-manifest/2", found)
    assert all(tensor.blocks == () for tensor in Manifest.unpack(old).tensors)
    store.delete(KEY)
    assert store.put_if_absent(KEY, old)
    assert np.array_equal(rows_of(store, 3, 2), WHOLE[3:5])
    assert store.asked == WHOLE.nbytes + 32


def test_ranks_that_differ_in_a_sum_of_a_block_are_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = DirectoryStore(tmp_path / "store")
    records = saved(store, tmp_path, world=2)
    index = read_index(store, records[1].index_key, records[1].index_crc64)
    odd = [replace(e, blocks=(1, *e.blocks[1:])) if e.blocks else e for e in index.extents]
    packed = replace(index, extents=odd).pack()
    store.delete(records[1].index_key)
    store.put_if_absent(records[1].index_key, packed)
    records[1] = replace(records[1], index_crc64=leaves.crc64(packed))
    with pytest.raises(CommitRefused, match="w: content differs"):
        commit(store, "run", 5, 1, records, 2, "w")


def test_documents_of_ordinary_models_hardly_grow() -> None:
    """Nothing for what is no larger than a block, and less than a byte for each MiB of others."""

    def text(nbytes: int, *, with_blocks: bool) -> int:
        count = -(-nbytes // BLOCK) if nbytes > BLOCK and with_blocks else 0
        made = [
            Extent(
                name=f"model/layers.{n}.weight",
                kind="replica",
                owner=0,
                dtype="uint8",
                shape=(nbytes,),
                offset=n * nbytes,
                nbytes=nbytes,
                blocks=(2**64 - 1,) * count,
            )
            for n in range(300)
        ]
        return len(seal("everstep-manifest/3", {"tensors": columns.to_json(Extents.of(made))}))

    assert text(BLOCK, with_blocks=True) == text(BLOCK, with_blocks=False)
    large = 96 << 20
    grown = columns.length_of_sums(300 * large // BLOCK)
    assert text(large, with_blocks=True) <= text(large, with_blocks=False) + grown
    assert grown < 300 * large >> 20
