"""Small tensors are filled by their addresses: the same bits, and no unsound one gets there."""

from pathlib import Path

import pytest

from checkpointing import keys
from checkpointing.commit import UploadRecord, commit
from checkpointing.errors import RestoreFailed
from checkpointing.manifest import read_manifest
from checkpointing.restore import Point, restore_from_memory, restore_from_store
from checkpointing.stage.arena import MappedArena
from checkpointing.stage.stager import Stager
from checkpointing.uploader.send import send
from tests.unit.checkpointing.test_sources import Counting

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
POINT = Point(step=5, attempt=1)


def state(*, filled: bool) -> dict[str, dict[str, object]]:
    """Small ones with larger, odd and empty ones in between."""
    found = {}
    for n in range(60):
        size = 200_000 if n % 20 == 7 else n
        found[f"t{n}"] = torch.arange(size, dtype=torch.float32) * (n + 1)
    found["odd"] = torch.arange(12.0).reshape(3, 4).t()
    found["bf16"] = torch.ones(5, dtype=torch.bfloat16)
    if not filled:
        for tensor in found.values():
            tensor.zero_()
    return {"model": found}


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    (tmp_path / "store").mkdir()
    store = Counting(tmp_path / "store")
    stager = Stager(tmp_path / "arena", attempt=1, rank=0, world=1)
    stager.stage(5, state(filled=True), None)
    arena = MappedArena(tmp_path / "arena")
    sent = send(store, "run", arena, arena.staged()[0])
    arena.close()
    record = UploadRecord(rank=0, index_key=sent.index_key, index_crc64=sent.index_crc64)
    commit(store, "run", 5, 1, [record], 1, "w")
    return store


def assert_filled(found: dict[str, dict[str, object]]) -> None:
    for name, tensor in state(filled=True)["model"].items():
        assert torch.equal(found["model"][name], tensor), name


def test_from_a_store_they_are_read_with_what_lies_between(store: Counting) -> None:
    found = state(filled=False)
    restore_from_store(store, "run", POINT, 0, 1, found, None)
    assert_filled(found)
    assert len(store.reads) == 1


def test_from_memory_alone_and_with_the_store_for_the_rest(store: Counting, tmp_path: Path) -> None:
    found = state(filled=False)
    restore_from_memory(tmp_path / "arena", POINT, 0, 1, found, None)
    assert_filled(found)
    with MappedArena(tmp_path / "arena").data(0) as data:
        data[:4096] = bytes(b ^ 1 for b in data[:4096])
    with pytest.raises(RestoreFailed, match="its bytes in memory fail their CRC"):
        restore_from_memory(tmp_path / "arena", POINT, 0, 1, state(filled=False), None)
    found = state(filled=False)
    restore_from_store(store, "run", POINT, 0, 1, found, None, tmp_path / "arena")
    assert_filled(found)


def test_a_flipped_byte_is_named_and_does_not_arrive(store: Counting, tmp_path: Path) -> None:
    (extent,) = (
        e
        for e in read_manifest(store, keys.manifest_key("run", 5, 1)).tensors
        if e.name == "model/t9"
    )
    path = tmp_path / "store" / keys.data_key("run", 5, 1, 0)
    raw = bytearray(path.read_bytes())
    raw[extent.offset + 3] ^= 1
    path.write_bytes(raw)
    found = state(filled=False)
    with pytest.raises(RestoreFailed, match=r"model/t9: its bytes in .* fail their CRC"):
        restore_from_store(store, "run", POINT, 0, 1, found, None)
    assert not found["model"]["t9"].any()  # type: ignore[attr-defined]


def test_another_shape_or_type_is_refused(store: Counting) -> None:
    for other in (torch.zeros(3), torch.zeros(9, dtype=torch.int32)):
        found = state(filled=False)
        found["model"]["t9"] = other
        with pytest.raises(RestoreFailed, match="model/t9: saved as tensor float32"):
            restore_from_store(store, "run", POINT, 0, 1, found, None)
