"""Python values of a state dict as JSON: the same value comes back, or none is stored."""

import contextlib
import enum
import io
import json
import math
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from checkpointing.dcp import values  # noqa: E402
from checkpointing.errors import ManifestInvalid  # noqa: E402

pytestmark = pytest.mark.torch

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
NESTED = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(NESTED)
def test_what_state_dicts_hold_comes_back_alike(value: Any) -> None:
    found = values.unpack(values.pack(value, "it"))
    assert found == value
    assert repr(found) == repr(value)  # tells 1 from True and 0.0 from -0.0


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"ab"),
        OrderedDict(b=1, a=2),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda:1"),
        {1, "two"},
        frozenset({1, "two"}),
        np.float32(0.1),
        np.int64(-3),
    ],
    ids=lambda value: type(value).__name__,  # a set has no order that two processes share
)
def test_other_types_come_back_as_they_were(value: Any) -> None:
    found = values.unpack(values.pack(value, "it"))
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_floats_that_json_lacks_come_back(value: float) -> None:
    assert repr(values.unpack(values.pack(value, "it"))) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones((), dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.int8),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
    ],
    ids=str,
)
def test_tensors_inside_values_come_back(value: Any) -> None:
    (found,) = values.unpack(values.pack((value,), "it"))
    assert found.dtype == value.dtype
    assert torch.equal(found, value)


def test_random_states_of_numpy_come_back() -> None:
    state = np.random.RandomState(3).get_state()
    found = values.unpack(values.pack(state, "rng"))
    assert found[0] == state[0]
    assert np.array_equal(found[1], state[1])
    assert found[2:] == state[2:]


def test_a_stream_keeps_its_bytes_and_its_place() -> None:
    stream = io.BytesIO(b"some bytes")
    stream.seek(4)
    found = values.unpack(values.pack(stream, "it"))
    assert (found.getvalue(), found.tell()) == (b"some bytes", 4)


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")  # noqa: PYI024
SELF: list[Any] = []
SELF.append(SELF)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (Colour.RED, "it: "),
        ({"a": [1, object()]}, r"it\['a'\]\[1\]: builtins.object"),
        (Pair(1, 2), "it: "),
        (defaultdict(list), "it: "),
        ([lambda: 0], r"it\[0\]: builtins.function"),
        (PurePosixPath("a"), "it: "),
        (np.array(["text"]), "it: array of dtype"),
        (torch.ones(2, 2).to_sparse(), "it: "),
        ({PurePosixPath("a"): 1}, "a key of it: "),
        (SELF, "contains itself"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_have_to_be_pickled_is_refused_by_its_place(value: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        values.pack(value, "it")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "[1]",
        '{"t":"pickle","v":"gASVAA=="}',
        '{"t":"tensor","d":"load","s":[1],"v":"AAAA"}',
        '{"t":"tensor","d":"float32","s":[1000000000000],"v":"AAAAAA=="}',
        '{"t":"tensor","d":"float32","s":[1000000000000],"v":""}',
        '{"t":"tensor","d":"float32","s":[-1],"v":""}',
        '{"t":"ndarray","d":"O","s":[1],"v":"AAAAAAAAAAA="}',
        '{"t":"ndarray","d":"float32","s":[2],"v":"AAAAAA=="}',
        '{"t":"number","d":"float32","v":""}',
        '{"t":"int","v":7}',
        '{"t":"int","v":"zz"}',
        '{"t":"bytes","v":"?"}',
        '{"t":"list","v":{"a":1}}',
        '{"t":"dict","k":[1,2],"v":[1]}',
        '{"t":"dict","k":[{"t":"list","v":[]}],"v":[1]}',
        '{"t":"set","v":[{"t":"list","v":[]}]}',
        '{"t":"size","v":["a"]}',
        '{"t":"dtype","v":"nn"}',
        '{"t":"device","v":"nowhere:x"}',
        '{"t":"bytesio","v":"","at":"x"}',
        '{"t":["list"],"v":[]}',
        '{"v":1}',
        '{"t":"list","v":' * 5000 + "[]" + "}" * 5000,
    ],
    ids=lambda text: text[:40],
)
def test_hostile_values_are_refused(text: str) -> None:
    with pytest.raises(ManifestInvalid):
        values.unpack(text.encode())


@given(
    st.recursive(
        ATOMS.filter(lambda v: not isinstance(v, bytes | complex)),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["t", "v", "k", "d", "s", "at"]), inner)
        ),
    )
)
def test_no_json_makes_it_fail_otherwise(node: Any) -> None:
    with contextlib.suppress(ManifestInvalid):
        values.decode(json.loads(json.dumps(node)))
