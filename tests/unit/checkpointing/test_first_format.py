"""Checkpoints of the first format, with an object for each tensor, are read for ever."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointing.content import content_sha256
from checkpointing.manifest import read_index, read_manifest
from checkpointing.resolver import list_commits
from checkpointing.restore import Point, restore_from_store
from checkpointing.sharded import Sharded
from checkpointing.store.directory import DirectoryStore
from checkpointing.verify import verify
from tests.unit.checkpointing.saved import save

FIRST = Path(__file__).parents[2] / "data" / "first_format"


def state(rank: int, world: int = 2) -> dict[str, Any]:
    """What was saved."""
    rng = np.random.default_rng(7)
    experts, each = rng.random((4, 3)).astype("f4"), 4 // world
    mine = experts[rank * each : (rank + 1) * each].copy()
    return {
        "model": {
            "w": rng.random((3, 5)),
            "b~/c": np.arange(6, dtype="i2"),
            "empty": np.zeros((0, 3), "f4"),
            "experts": Sharded(local=mine, shape=(4, 3), start=(rank * each, 0)),
        },
        "step": 9,
        "lr": float("inf"),
        "big": 1 << 70,
        "row": [np.ones(()), (b"x", None, True)],
    }


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    shutil.copytree(FIRST, tmp_path / "store")
    return DirectoryStore(tmp_path / "store")


def test_it_is_listed_verified_and_restored_in_any_world(store: DirectoryStore) -> None:
    (commit,) = list_commits(store, "run")
    assert verify(store, commit).problems == ()
    for world in (1, 2, 4):
        for rank in range(world):
            wanted, found = state(rank, world), state(rank, world)
            for leaf in (*found["model"].values(), found["row"][0]):
                np.asarray(getattr(leaf, "local", leaf))[...] = 7
            found |= {"step": 0, "lr": 0.0, "big": 0}
            restore_from_store(store, "run", Point(step=9, attempt=1), rank, world, found, None)
            pieces = [one["model"].pop("experts").local for one in (wanted, found)]
            assert np.array_equal(*pieces)
            assert repr(found) == repr(wanted)


def test_what_is_saved_now_is_the_same(store: DirectoryStore) -> None:
    save(store, "now", 9, state=state, world=2)
    assert content_sha256(store, "now", 9) == content_sha256(store, "run", 9)
    manifests = [read_manifest(store, list_commits(store, run)[0].key) for run in ("run", "now")]
    assert manifests[0].tensors == manifests[1].tensors
    assert manifests[0].skeleton == manifests[1].skeleton
    for shards in zip(manifests[0].shards, manifests[1].shards, strict=True):
        indexes = [read_index(store, shard.index_key, shard.index_crc64) for shard in shards]
        assert indexes[0].extents == indexes[1].extents
        assert indexes[0].local_skeleton == indexes[1].local_skeleton
