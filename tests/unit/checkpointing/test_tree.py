import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.plan import flatten, make_plan, owners, structure_hash, unflatten
from checkpointing.tree import put_back


def _back(state: dict[str, Any]) -> Any:
    flat = flatten(state)
    return unflatten(json.loads(json.dumps(flat.skeleton)), flat.leaves)


keys = st.one_of(st.text(max_size=5), st.integers(-(2**40), 2**40))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=5), trees, max_size=4))
def test_python_values_come_back_exactly(state: dict[str, Any]) -> None:
    assert repr(_back(state)) == repr(state)


def test_values_that_json_lacks_come_back() -> None:
    state = {"a": float("inf"), "b": (1, [2, (3,)]), "c": b"\0\xff", "d": 2**4000, "e": -0.0}
    back = _back(state)
    assert back == state
    assert math.copysign(1, back["e"]) == -1
    assert math.isnan(_back({"n": math.nan})["n"])


def test_integer_and_string_keys_stay_apart() -> None:
    state = {"o": {1: "int", "2": "str"}}
    assert _back(state) == state


def test_arrays_are_leaves_named_by_their_path() -> None:
    flat = flatten({"m": {"a/b": np.ones(3), 0: [np.zeros(2)]}})
    assert list(flat.leaves) == ["m/a~1b", "m/0/0"]


@pytest.mark.parametrize(
    "bad",
    [
        {1, 2},
        object(),
        np.float64(1.0),
        np.array(["a"]),
        np.array([object()]),
        np.ones(2, ">f4"),
        {(1, 2): 3},
        lambda: 0,
    ],
)
def test_what_cannot_be_kept_exactly_is_refused_with_its_path(bad: Any) -> None:
    with pytest.raises(TypeError, match="outer/inner"):
        flatten({"outer": {"inner": bad}})


@pytest.mark.parametrize("key", [(1, 2), True, None, 1.5, 2**60])
def test_keys_that_json_would_change_are_refused_at_every_level(key: Any) -> None:
    for state in ({key: 1}, {"outer": {key: 1}}):
        with pytest.raises(TypeError, match="is neither a string nor a small whole number"):
            flatten(state)


def test_an_object_inside_is_refused_and_at_the_top_accepted() -> None:
    class Holder:
        def state_dict(self) -> dict[str, Any]:
            return OrderedDict(x=np.ones(2), n=1)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    holder = Holder()
    flat = flatten({"h": holder})
    put_back({"h": holder}, flat.skeleton, flat.leaves)
    assert holder.loaded["n"] == 1
    with pytest.raises(TypeError, match="deep/h"):
        flatten({"deep": {"h": holder}})


def test_an_object_does_not_take_what_was_saved_from_a_dict_and_the_other_way_round() -> None:
    class Counter:
        n = 0

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.n = state["n"]

    plain, held = flatten({"c": {"n": 7}}), flatten({"c": Counter()})
    with pytest.raises(KeyError, match="c: saved from a value, the state has an object"):
        put_back({"c": Counter()}, plain.skeleton, plain.leaves)
    with pytest.raises(KeyError, match="c: saved from an object, the state has a value"):
        put_back({"c": {"n": 0}}, held.skeleton, held.leaves)


def test_plain_values_are_put_back_in_place() -> None:
    inner: dict[str, Any] = {"epoch": 0, "sub": {"lr": 0.5}, "list": [1]}
    state = {"s": inner, "top": 3}
    saved = flatten({"s": {"epoch": 7, "sub": {"lr": 0.25}, "list": [4, 5]}, "top": 9})
    put_back(state, saved.skeleton, saved.leaves)
    assert inner == {"epoch": 7, "sub": {"lr": 0.25}, "list": [4, 5]}
    assert state["top"] == 9


def test_a_state_with_other_keys_is_refused() -> None:
    saved = flatten({"a": {"x": 1}})
    with pytest.raises(KeyError, match="b"):
        put_back({"a": {"x": 1}, "b": 1}, saved.skeleton, saved.leaves)
    with pytest.raises(KeyError, match="y"):
        put_back({"a": {"x": 1, "y": 2}}, saved.skeleton, saved.leaves)


@given(st.dictionaries(st.text(max_size=4), st.integers(0, 10**6), max_size=20), st.integers(1, 8))
def test_owners_are_balanced_and_do_not_depend_on_order(sizes: dict[str, int], world: int) -> None:
    chosen = owners(sizes, world)
    assert chosen == owners(dict(reversed(sizes.items())), world)
    loads = [sum(sizes[n] for n, r in chosen.items() if r == rank) for rank in range(world)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_a_plan_lays_out_own_extents_first_and_aligned() -> None:
    sizes = (1000, 5000, 1001, 1002, 1003, 6000)
    replica = flatten({"m": {f"w{n}": np.zeros(n, np.int8) for n in sizes}})
    local = flatten({"rng": np.zeros(5)})
    plan = make_plan(replica, local, rank=1, world=2)
    mine = [extent.owner == 1 for extent in plan.extents]
    assert mine == sorted(mine, reverse=True)
    assert all(e.offset % (4096 if e.nbytes >= 4096 else 64) == 0 for e in plan.extents)
    assert plan.data_nbytes == 4096 * 5
    assert plan.structure == structure_hash(replica, local, 1, 2)
    assert plan.structure != structure_hash(replica, local, 0, 2)


@pytest.mark.torch
def test_torch_leaves_of_every_kind_are_copied_bit_for_bit() -> None:
    torch = pytest.importorskip("torch")
    from checkpointing import leaves

    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    kinds = [
        base,
        base.t(),
        base[::2],
        base.to(torch.bfloat16),
        base.bool(),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 3),
        torch.complex(base, base),
        torch.complex(base, base).conj(),
        torch.nn.Parameter(base),
        base.to(torch.float8_e4m3fn),
    ]
    for leaf in kinds:
        out = np.empty(leaves.nbytes_of(leaf), np.uint8)
        leaves.copy_out(leaf, out)
        fresh = leaves.empty("tensor", leaves.dtype_of(leaf), leaves.shape_of(leaf))
        leaves.copy_in(fresh, out)
        assert fresh.dtype == leaf.dtype
        assert torch.equal(
            fresh.float() if fresh.dtype == torch.float8_e4m3fn else fresh,
            leaf.float() if leaf.dtype == torch.float8_e4m3fn else leaf.detach(),
        )


@pytest.mark.torch
def test_torch_tensors_that_are_no_plain_bytes_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for bad in (torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta"), torch.float32):
        with pytest.raises(TypeError, match="m/x"):
            flatten({"m": {"x": bad}})
