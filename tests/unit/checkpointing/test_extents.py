"""Columns hold what the extents that they are made of held."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointing import columns, leaves
from checkpointing.extents import KINDS, Extent, Extents, join

BLOCK = 64


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaves, "BLOCK", BLOCK)
        yield


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    kind = draw(st.sampled_from(KINDS))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    dtype, size = draw(st.sampled_from((("float32", 4), ("int8", 1))))
    nbytes = size * math.prod(shape)
    sums = st.integers(0, 2**64 - 1)
    more: dict[str, Any] = {}
    if kind != "local":
        count = -(-nbytes // BLOCK) if nbytes > BLOCK else 0
        more["blocks"] = tuple(draw(st.lists(sums, min_size=count, max_size=count)))
    if kind == "shard":
        start = tuple(draw(st.integers(0, 3)) for _ in shape)
        whole = tuple(a + n for a, n in zip(start, shape, strict=True))
        more |= {"whole": whole, "start": start}
    return Extent(
        name=draw(st.text(max_size=5)),
        kind=kind,
        owner=draw(st.integers(-1, 1000)),
        dtype=dtype,
        shape=shape,
        offset=draw(st.integers(-1, 2**40)),
        nbytes=nbytes,
        crc64=draw(sums),
        **more,
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(extents(), max_size=12), st.data())
def test_columns_and_their_json_hold_what_the_extents_held(
    rows: list[Extent], data: st.DataObject
) -> None:
    made = Extents.of(rows)
    assert list(made) == rows
    assert made == tuple(rows)
    text = json.dumps(columns.to_json(made))
    assert columns.from_json(json.loads(text), "they") == rows
    numbers = data.draw(st.permutations(range(len(rows))))
    some = numbers[: data.draw(st.integers(0, len(rows)))]
    taken = made.rows(np.array(some, np.intp))
    assert list(taken) == [rows[n] for n in some]
    assert list(columns.from_json(columns.to_json(taken), "they")) == list(taken)
    assert list(made[1:]) == rows[1:]
    assert [made[n] for n in range(-len(rows), 0)] == rows


@given(st.lists(extents(), max_size=12))
def test_sums_of_replicas_are_written_for_all_of_them_or_for_none(rows: list[Extent]) -> None:
    replicas = [e for e in rows if e.kind == "replica" and e.blocks]
    known = [replace(e, blocks=()) if e in replicas[:1] else e for e in rows]
    wanted = [replace(e, blocks=()) if e.kind == "replica" else e for e in rows]
    found = columns.from_json(columns.to_json(Extents.of(known)), "they")
    assert list(found) == (wanted if replicas else rows)


@given(st.lists(st.lists(extents(), max_size=5), max_size=4))
def test_joined_columns_are_one_after_the_other(several: list[list[Extent]]) -> None:
    assert list(join([Extents.of(rows) for rows in several])) == [
        e for rows in several for e in rows
    ]


def test_a_number_beyond_the_end_is_an_error() -> None:
    with pytest.raises(IndexError):
        Extents.of(())[0]
