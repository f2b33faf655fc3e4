"""Documents that claim more than there is take no memory, wherever they are read."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointing import keys
from checkpointing.checksum import crc64
from checkpointing.content import content_sha256
from checkpointing.errors import CheckpointingError, ManifestInvalid, ObjectCorrupt, RestoreFailed
from checkpointing.manifest import Manifest, read_manifest
from checkpointing.quarantine import list_quarantined
from checkpointing.resolver import find_commit, list_commits
from checkpointing.restore import Point, restore_from_store
from checkpointing.store.base import MOST_BYTES
from checkpointing.store.directory import DirectoryStore
from checkpointing.verify import verify
from tests.unit.checkpointing.saved import save, store_at

ELEMENTS = 1 << 34
ROOM = 64 << 20


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = store_at(tmp_path / "store")
    for step in (1, 2):
        save(store, "run", step, state=lambda _: {"w": np.arange(8.0)}, world=1)
    return store


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < ROOM
    finally:
        tracemalloc.stop()


def claim(store: DirectoryStore, tmp_path: Path) -> None:
    """Let the newest manifest say that its tensor has 128 GiB, and agree with itself in that."""
    key = keys.manifest_key("run", 2, 1)
    manifest = read_manifest(store, key)
    (tensor,) = manifest.tensors
    nbytes = ELEMENTS * 8 + 32
    large = replace(
        manifest,
        nbytes=nbytes,
        shards=(replace(manifest.shards[0], data_nbytes=nbytes),),
        tensors=(replace(tensor, shape=(ELEMENTS,), nbytes=ELEMENTS * 8),),
    )
    assert Manifest.unpack(large.pack()) == large, "nothing in it is wrong but the facts"
    (tmp_path / "store" / key).write_bytes(large.pack())


@pytest.mark.parametrize("state", [{}, {"w": np.zeros(8)}], ids=["made anew", "there"])
def test_a_restore_makes_no_room_for_what_is_not_there(
    store: DirectoryStore, tmp_path: Path, state: dict[str, Any]
) -> None:
    claim(store, tmp_path)
    with little_memory(), pytest.raises(RestoreFailed):
        restore_from_store(store, "run", Point(step=2, attempt=1), 0, 1, dict(state), None)


def test_nothing_else_makes_room_for_it(store: DirectoryStore, tmp_path: Path) -> None:
    claim(store, tmp_path)
    with little_memory():
        assert verify(store, find_commit(store, "run", 2)).problems
        with pytest.raises(CheckpointingError):
            content_sha256(store, "run", 2)


READS: dict[str, Callable[[DirectoryStore], object]] = {
    "manifest": lambda store: read_manifest(store, keys.manifest_key("run", 2, 1)),
    "list": lambda store: list_commits(store, "run"),
    "quarantine": lambda store: list_quarantined(store, "run"),
}


@pytest.mark.parametrize("name", READS)
def test_a_document_too_large_for_one_is_not_read(
    store: DirectoryStore, tmp_path: Path, name: str
) -> None:
    place = "quarantine" if name == "quarantine" else "commits"
    path = tmp_path / "store" / f"run/{place}/step-000000000002-attempt-0001.json"
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with little_memory():
        if name == "manifest":
            with pytest.raises(ManifestInvalid, match="no document"):
                READS[name](store)
        else:
            READS[name](store)
    assert [commit.step for commit in list_commits(store, "run")] == [1]


def test_a_store_returns_no_large_object_whole(store: DirectoryStore, tmp_path: Path) -> None:
    with (tmp_path / "store" / "large").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with little_memory(), pytest.raises(ObjectCorrupt, match="no document"):
        store.get("large")


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_makes_no_room_for_a_value_that_is_not_there(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from checkpointing.dcp import EverstepReader, EverstepWriter

    dcp.save({"a": torch.ones(2), "c": "text"}, storage_writer=EverstepWriter(tmp_path))
    (path,) = tmp_path.glob("commits/*")
    head, _, body = path.read_bytes().partition(b"\n")
    found = json.loads(body)
    found["values"]["c"][2] = 1 << 40
    found["objects"] = [[key, 1 << 41, crc] for key, _, crc in found["objects"]]
    body = json.dumps(found).encode()
    head = json.dumps({**json.loads(head), "crc64": crc64(body)}).encode()
    path.write_bytes(head + b"\n" + body)
    reader = EverstepReader(tmp_path)
    with little_memory(), pytest.raises(CheckpointException) as raised:
        dcp.load({"a": torch.zeros(2), "c": ""}, storage_reader=reader)
    (failure,) = raised.value.failures.values()
    assert isinstance(failure[0], RestoreFailed)
    assert "does not have" in str(failure[0])
