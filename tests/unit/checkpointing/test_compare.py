from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointing.compare import Difference, Kind, compare, compare_values
from checkpointing.manifest import Manifest, read_manifest
from checkpointing.sharded import Sharded
from checkpointing.store.directory import DirectoryStore
from tests.unit.checkpointing.saved import save, store_at

Make = Callable[[int], dict[str, Any]]


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return store_at(tmp_path / "store")


def saved(store: DirectoryStore, step: int, make: Make, world: int = 2) -> Manifest:
    return read_manifest(store, save(store, "run", step, state=make, world=world).manifest_key)


def differences(
    store: DirectoryStore, first: Make, second: Make, **more: Any
) -> dict[str, Difference]:
    one, other = saved(store, 1, first), saved(store, 2, second)
    return {difference.name: difference for difference in compare(store, one, other, **more)}


def test_every_kind_of_difference_is_told(store: DirectoryStore) -> None:
    def first(_: int) -> dict[str, Any]:
        return {
            "model": {
                "same": np.arange(6.0),
                "moved": np.array([1.0, 2.0, np.nan, np.inf], "f4"),
                "cast": np.arange(3.0),
                "grown": np.zeros((2, 2)),
                "gone": np.zeros(1),
                "whole": np.array([1, 2], "i8"),
                "flag": np.array([True, False]),
                "none": np.empty((0, 3)),
            },
            "lr": 0.5,
        }

    def second(_: int) -> dict[str, Any]:
        state = first(0)
        model = state["model"]
        del model["gone"]
        model["moved"] = np.array([1.0, -2.5, np.nan, 1.0], "f4")
        model |= {"cast": np.arange(3, dtype="f4"), "grown": np.zeros((2, 3)), "new": np.zeros(2)}
        model |= {"whole": np.array([1, -9], "i8"), "flag": np.array([True, True])}
        return state

    found = differences(store, first, second)
    kinds = {name.removeprefix("model/"): difference.kind for name, difference in found.items()}
    assert kinds == {
        "same": Kind.EQUAL,
        "none": Kind.EQUAL,
        "moved": Kind.CHANGED,
        "cast": Kind.OTHER_TYPE,
        "grown": Kind.OTHER_TYPE,
        "gone": Kind.ONLY_FIRST,
        "new": Kind.ONLY_SECOND,
        "whole": Kind.CHANGED,
        "flag": Kind.CHANGED,
    }
    moved = found["model/moved"]
    assert (moved.elements, moved.total, moved.max_abs, moved.non_finite) == (2, 4, 4.5, 2)
    assert found["model/whole"].max_abs == 11
    assert found["model/flag"].max_abs == 1
    assert found["model/cast"].detail == "float64 [3] against float32 [3]"
    assert found["model/gone"].detail == "float64 [1]"


def test_layout_makes_no_difference(store: DirectoryStore) -> None:
    data = np.random.default_rng(0).random((6, 4))

    def split(rank: int) -> dict[str, Any]:
        return {"w": Sharded(local=data[3 * rank :][:3], shape=(6, 4), start=(3 * rank, 0))}

    found = differences(store, split, lambda _: {"w": data})
    assert found["w"].kind is Kind.EQUAL


def test_equal_sums_are_not_read(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    one = saved(store, 1, lambda _: {"w": np.arange(9.0)})
    other = saved(store, 2, lambda _: {"w": np.arange(9.0)})
    monkeypatch.setattr(store, "read_into", None)
    assert [d.kind for d in compare(store, one, other)] == [Kind.EQUAL]


def test_a_subtree_is_compared_alone(store: DirectoryStore) -> None:
    def make(_: int) -> dict[str, Any]:
        return {"model": {"w": np.zeros(1)}, "model2": np.zeros(1), "optimizer": np.zeros(1)}

    assert list(differences(store, make, make, subtree="model")) == ["model/w"]


@pytest.mark.torch
def test_bfloat16_is_decoded(store: DirectoryStore) -> None:
    torch = pytest.importorskip("torch")
    found = differences(
        store,
        lambda _: {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)},
        lambda _: {"w": torch.tensor([1.0, -3.0], dtype=torch.bfloat16)},
    )
    assert found["w"].max_abs == 5.0


def test_python_values_that_differ_are_told(store: DirectoryStore) -> None:
    one = saved(store, 1, lambda _: {"a": 1, "b": [1, (2, 3)], "w": np.zeros(1), "k": {0: "x"}})
    other = saved(store, 2, lambda _: {"a": 1, "b": [1, (2, 4), b"z"], "k": {0: 1e400}})
    assert list(compare_values(one.skeleton, other.skeleton)) == [
        ("b/1/1", "3", "4"),
        ("b/2", "-", "eg=="),
        ("k/0", "'x'", "inf"),
    ]
