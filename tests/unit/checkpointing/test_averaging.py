from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointing import keys, mean
from checkpointing.averaging import Averaged, AverageRefused, average
from checkpointing.errors import ObjectConflict, RestoreFailed
from checkpointing.manifest import Manifest, read_commit, read_manifest
from checkpointing.resolver import find_commit, list_commits
from checkpointing.sharded import Sharded
from checkpointing.store.directory import DirectoryStore
from checkpointing.tensors import read_batch, whole_tensors
from checkpointing.verify import verify
from tests.unit.checkpointing.saved import save, store_at

STEPS = (10, 20, 30, 40)


def tensors(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {
        "w": rng.normal(0, 1, (7, 5)).astype("f4"),
        "half": rng.normal(0, 1, 9).astype("f2"),
        "double": np.array(rng.random()),
        "counter": np.array([step]),
        "none": np.empty((0, 2), "f4"),
        "experts": rng.random((6, 2)),
    }


def state(step: int, rank: int) -> dict[str, Any]:
    model = tensors(step)
    piece = model["experts"][3 * rank :][:3]
    model["experts"] = Sharded(local=piece, shape=(6, 2), start=(3 * rank, 0))
    return {"model": {"inner": model, "note": "x"}, "optimizer": {"m": np.zeros(9)}, "epoch": step}


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = store_at(tmp_path / "store")
    for step in STEPS:
        save(store, "run", step, state=lambda rank, step=step: state(step, rank))  # type: ignore[misc]
    return store


def manifests(store: DirectoryStore) -> list[Manifest]:
    return [read_manifest(store, commit.key) for commit in list_commits(store, "run")]


def averaged(store: DirectoryStore, made: Averaged) -> dict[str, Any]:
    manifest = read_commit(store, made.run, *made.of[0])
    found = whole_tensors(manifest)
    return {
        tensor.parts[-1]: raw.view(tensor.dtype).reshape(tensor.shape)
        for tensor, raw in zip(found, read_batch(store, manifest, found), strict=True)
    }


def test_the_average_is_that_of_all_and_of_the_weights_alone(store: DirectoryStore) -> None:
    made = average(store, "run", manifests(store), label="last-4")
    assert made.outcome.committed
    assert made.of == ((40, 1), (30, 1), (20, 1), (10, 1))
    assert (made.tensors, made.copied) == (5, 1)
    found = averaged(store, made)
    for name, kept in tensors(40).items():
        if name == "counter":
            assert found[name].tolist() == [40]
            continue
        wide = [tensors(step)[name].astype("f8") for step in STEPS]
        wanted = (sum(wide) / len(wide)).astype(kept.dtype)
        assert found[name].tobytes() == wanted.tobytes(), name
    manifest = read_commit(store, made.run, 40, 1)
    assert manifest.average_of == made.of
    assert not any(name.name.startswith("optimizer") for name in manifest.tensors)
    assert verify(store, find_commit(store, made.run, 40)).problems == ()


def test_an_average_is_never_found_by_who_resumes(store: DirectoryStore) -> None:
    before = list_commits(store, "run")
    made = average(store, "run", manifests(store), label="last-4")
    assert list_commits(store, "run") == before
    copy = read_commit(store, made.run, 40, 1)
    assert keys.manifest_key(made.run, 40, 1).startswith("run/averages/last-4/")
    # Even one that were put there by hand is none of this run's.
    store.put_if_absent(keys.manifest_key("run", 50, 1), copy.pack())
    assert list_commits(store, "run") == before


def test_doing_it_again_changes_nothing_and_others_need_another_label(
    store: DirectoryStore,
) -> None:
    found = manifests(store)
    average(store, "run", found, label="a")
    again = average(store, "run", found, label="a")
    assert again.outcome.committed
    assert again.outcome.already
    with pytest.raises(ObjectConflict, match="choose another label"):
        average(store, "run", found[:2], label="a")
    assert average(store, "run", found[:2], label="b").outcome.committed


def test_another_type_can_be_asked_for(store: DirectoryStore) -> None:
    made = average(store, "run", manifests(store), label="wide", dtype="float32")
    found = averaged(store, made)
    assert {name: str(value.dtype) for name, value in found.items()} == {
        "w": "float32",
        "half": "float32",
        "double": "float32",
        "counter": "int64",
        "none": "float32",
        "experts": "float32",
    }
    wide = [tensors(step)["half"].astype("f8") for step in STEPS]
    assert np.array_equal(found["half"], (sum(wide) / 4).astype("f4"))
    with pytest.raises(AverageRefused, match="no floating type"):
        average(store, "run", manifests(store), label="x", dtype="int8")


def test_checkpoints_that_do_not_fit_together_are_refused(store: DirectoryStore) -> None:
    found = manifests(store)
    with pytest.raises(AverageRefused, match="no tensors below 'weights'"):
        average(store, "run", found, label="x", subtree="weights")
    with pytest.raises(AverageRefused, match="no checkpoints"):
        average(store, "run", [], label="x")
    save(store, "run", 50, state=lambda _: {"model": {"inner": {"w": np.zeros((7, 5), "f4")}}})
    with pytest.raises(AverageRefused, match="model/inner/counter: not in both of steps 50 and"):
        average(store, "run", manifests(store), label="x")
    save(store, "run", 60, state=lambda _: {"model": {"inner": {"w": np.zeros((7, 5))}}})
    with pytest.raises(AverageRefused, match=r"model/inner/w: float64 .* at step 60, float32"):
        average(store, "run", manifests(store)[:2], label="x")
    assert store.list("run/averages/") == ()


def test_a_flipped_byte_makes_no_average(store: DirectoryStore, tmp_path: Path) -> None:
    path = tmp_path / "store" / keys.data_key("run", 20, 1, 0)
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    with pytest.raises(RestoreFailed, match="fail their CRC"):
        average(store, "run", manifests(store), label="x")
    assert store.list("run/averages/") == ()


def test_large_tensors_are_averaged_on_disk_with_bounded_memory(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = average(store, "run", manifests(store), label="a")
    monkeypatch.setattr(mean, "_BATCH", 64)
    monkeypatch.setattr(mean, "_MOST_MEMORY", 64)
    monkeypatch.setattr(mean, "_CHUNK", 3)
    large = average(store, "run", manifests(store), label="b")
    one, other = averaged(store, small), averaged(store, large)
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)
