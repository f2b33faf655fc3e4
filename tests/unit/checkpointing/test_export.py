"""Exported files are read here by an own, strict reader of the format, and by torch."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointing import export, keys, tensors
from checkpointing.errors import ManifestInvalid, RestoreFailed
from checkpointing.export import export_safetensors
from checkpointing.export_dcp import export_dcp
from checkpointing.manifest import Manifest, read_manifest
from checkpointing.safetensors import TYPES, ExportRefused
from checkpointing.sharded import Sharded
from checkpointing.store.directory import DirectoryStore
from tests.unit.checkpointing.saved import save, store_at

NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "U8": "u1", "BOOL": "?"}


def read_safetensors(path: Path) -> dict[str, Any]:
    """Read a file and check all that the format demands."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    data, found, end = raw[8 + length :], {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        assert first == end
        end = last
        dtype = np.dtype(NUMPY[entry["dtype"]])
        assert last - first == math.prod(entry["shape"]) * dtype.itemsize
        assert (8 + length + first) % dtype.itemsize == 0
        found[name] = np.frombuffer(data[first:last], dtype).reshape(entry["shape"])
    assert end == len(data)
    return found


def read_dcp(state: dict[str, Any], folder: Path) -> None:
    from torch.distributed.checkpoint import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process only
        load(state, checkpoint_id=folder, no_dist=True)


def model() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "embed.weight": rng.random((20, 8)).astype("f4"),
        "layers.0.w": rng.random((8, 8)),
        "layers.0.flag": np.array([True, False, True]),
        "layers.0.half": rng.random(5).astype("f2"),
        "layers.0.count": np.array(7),
        "none": np.empty((0, 3), "f4"),
        "experts": rng.random((6, 4)).astype("f4"),
        "nested": {"a/b": np.arange(3, dtype="i4"), "c": {"d": np.arange(3, dtype="u1")}},
    }


WANTED = {
    **{name: value for name, value in model().items() if name != "nested"},
    "nested.a/b": np.arange(3, dtype="i4"),
    "nested.c.d": np.arange(3, dtype="u1"),
}


def state(rank: int) -> dict[str, Any]:
    held = model()
    piece = held["experts"][3 * rank :][:3]
    held["experts"] = Sharded(local=piece, shape=(6, 4), start=(3 * rank, 0))
    return {"model": held, "optimizer": {"m": np.zeros(9)}, "epoch": 3, "lr": [0.1, (1, None)]}


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return store_at(tmp_path / "store")


@pytest.fixture
def manifest(store: DirectoryStore) -> Manifest:
    return read_manifest(store, save(store, "run", 5, state=state).manifest_key)


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[n].dtype == w.dtype
        and found[n].shape == w.shape
        and found[n].tobytes() == w.tobytes()
        for n, w in wanted.items()
    )


def test_the_weights_come_out_bit_for_bit(
    store: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    done = export_safetensors(store, manifest, tmp_path / "out")
    assert done.files == ("model.safetensors",)
    assert done.tensors == len(WANTED)
    assert same(read_safetensors(tmp_path / "out" / "model.safetensors"), WANTED)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(sorted(WANTED), "model.safetensors")
    assert index["metadata"]["total_size"] == done.nbytes == sum(w.nbytes for w in WANTED.values())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_files_are_bounded_and_the_index_finds_every_tensor(
    store: DirectoryStore, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "BATCH", 64)
    done = export_safetensors(store, manifest, tmp_path / "out", shard_bytes=600)
    count = len(done.files)
    assert count > 2
    assert done.files[0] == f"model-00001-of-{count:05d}.safetensors"
    read = {name: read_safetensors(tmp_path / "out" / name) for name in done.files}
    assert same({k: v for held in read.values() for k, v in held.items()}, WANTED)
    for held in read.values():
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= 600
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {k: name for name, held in read.items() for k in held}


def test_another_subtree_and_a_stripped_name(
    store: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    export_safetensors(store, manifest, tmp_path / "a", subtree="model/nested")
    assert set(read_safetensors(tmp_path / "a" / "model.safetensors")) == {"a/b", "c.d"}
    export_safetensors(store, manifest, tmp_path / "b", strip="layers.0.")
    assert "half" in read_safetensors(tmp_path / "b" / "model.safetensors")
    export_safetensors(store, manifest, tmp_path / "c", subtree="")
    assert "optimizer.m" in read_safetensors(tmp_path / "c" / "model.safetensors")
    export_safetensors(store, manifest, tmp_path / "d", subtree="optimizer/m")
    assert set(read_safetensors(tmp_path / "d" / "model.safetensors")) == {"m"}


def test_what_cannot_be_exported_leaves_nothing(
    store: DirectoryStore, manifest: Manifest, tmp_path: Path
) -> None:
    with pytest.raises(ExportRefused, match="no tensors below 'weights'"):
        export_safetensors(store, manifest, tmp_path / "out", subtree="weights")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ExportRefused, match="no empty folder"):
        export_safetensors(store, manifest, tmp_path / "full")
    odd = read_manifest(
        store,
        save(store, "run", 6, state=lambda _: {"model": {"z": np.zeros(2, "c16")}}).manifest_key,
    )
    with pytest.raises(ExportRefused, match="model/z: safetensors has no type complex128"):
        export_safetensors(store, odd, tmp_path / "out")
    twice = {"model": {"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)}}
    both = read_manifest(store, save(store, "run", 7, state=lambda _: twice).manifest_key)
    with pytest.raises(ExportRefused, match=r"would both be a\.b"):
        export_safetensors(store, both, tmp_path / "out")
    path = tmp_path / "store" / keys.data_key("run", 5, 1, 0)
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(RestoreFailed, match="fail their CRC"):
        export_safetensors(store, manifest, tmp_path / "out")
    path.write_bytes(content[:50])
    with pytest.raises(ManifestInvalid, match="has 50 bytes"):
        export_safetensors(store, manifest, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "store"]


@pytest.mark.torch
def test_every_type_of_the_format_goes_through_torch(store: DirectoryStore, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    raw = torch.arange(64, dtype=torch.uint8)
    held = {name: raw.clone().view(getattr(torch, name)) for name in TYPES if name != "bool"}
    held["bool"] = raw % 2 == 0
    manifest = read_manifest(
        store, save(store, "run", 5, state=lambda _: {"model": held}).manifest_key
    )
    export_safetensors(store, manifest, tmp_path / "out")
    raw_file = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(raw_file[:8], "little")
    header = json.loads(raw_file[8 : 8 + length])
    for name, tensor in held.items():
        first, last = header[name]["data_offsets"]
        assert header[name]["dtype"] == TYPES[name]
        assert raw_file[8 + length :][first:last] == tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.torch
def test_dcp_loads_the_folder_bit_for_bit(store: DirectoryStore, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def make(rank: int) -> dict[str, Any]:
        full = torch.arange(24, dtype=torch.bfloat16).reshape(6, 4)
        piece = full[3 * rank :][:3].clone()
        return {
            "model": {
                "w": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)),
                "experts": Sharded(local=piece, shape=(6, 4), start=(3 * rank, 0)),
                "none": torch.empty(0, 2),
            },
            "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.5}]},
            "epoch": 9,
        }

    manifest = read_manifest(store, save(store, "run", 5, state=make).manifest_key)
    done = export_dcp(store, manifest, tmp_path / "all")
    assert done.tensors == 4
    assert not (tmp_path / "all" / ".tensors").exists()
    target: dict[str, Any] = {
        "model": {
            "w": torch.zeros(5, 3),
            "experts": torch.zeros(6, 4, dtype=torch.bfloat16),
            "none": torch.empty(0, 2),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(0.0)}}, "groups": [{"lr": 0.0}]},
        "epoch": 0,
    }
    read_dcp(target, tmp_path / "all")
    assert torch.equal(target["model"]["w"], make(0)["model"]["w"])
    assert torch.equal(
        target["model"]["experts"], torch.arange(24, dtype=torch.bfloat16).reshape(6, 4)
    )
    assert target["optimizer"]["state"][0]["step"].item() == 3.0
    assert target["optimizer"]["groups"] == [{"lr": 0.5}]
    assert target["epoch"] == 9
    export_dcp(store, manifest, tmp_path / "part", subtree="model")
    part = {"model": {"w": torch.zeros(5, 3)}}
    read_dcp(part, tmp_path / "part")
    assert torch.equal(part["model"]["w"], make(0)["model"]["w"])
    with pytest.raises(ExportRefused, match="no tensors"):
        export_dcp(store, manifest, tmp_path / "x", subtree="weights")
    assert export.SHARD_BYTES == 5 * 10**9
