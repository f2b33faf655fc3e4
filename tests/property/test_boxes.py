"""Pieces of tensors: overlaps, coverage and row ranges, against numpy as the judge."""

import math
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.boxes import Box, gap, row_range, split, whole

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(start, tuple(draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(shapes)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


def marked(shape: tuple[int, ...], *boxes: Box) -> np.ndarray:
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.slices()] += 1
    return count


@given(pairs())
def test_an_overlap_is_what_both_mark(pair: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, one, other = pair
    common = one.overlap(other)
    twice = marked(shape, one, other) == 2
    assert (common.volume if common else 0) == twice.sum()
    if common is not None:
        assert twice[common.slices()].all()
        assert common == other.overlap(one)


@given(st.data())
def test_boxes_cover_when_each_element_is_marked_once(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    boxes = data.draw(st.lists(boxes_in(shape), max_size=4))
    assert (gap(boxes, shape) == "") == bool((marked(shape, *boxes) == 1).all())


@given(st.data())
def test_a_grid_of_pieces_covers_and_loses_or_doubles_nothing_unseen(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    parts = [split(n, data.draw(st.integers(1, 4))) for n in shape]
    grid = [Box(tuple(a for a, _ in cut), tuple(n for _, n in cut)) for cut in product(*parts)]
    assert gap(grid, shape) == ""
    filled = [box for box in grid if box.volume]
    if filled:
        chosen = data.draw(st.sampled_from(filled))
        assert gap([box for box in grid if box != chosen], shape)
        assert gap([*grid, chosen], shape)


@given(st.integers(0, 40), st.integers(1, 9))
def test_a_split_has_no_gap_and_no_piece_is_longer_than_the_first(size: int, parts: int) -> None:
    found = split(size, parts)
    assert len(found) == parts
    assert sum(length for _, length in found) == size
    assert all(length <= found[0][1] for _, length in found)
    ends = [start + length for start, length in found]
    assert [start for start, _ in found[1:]] == ends[:-1]


@given(st.data())
def test_a_row_range_holds_the_part_and_begins_and_ends_with_it(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple))
    part = data.draw(boxes_in(shape).filter(lambda box: box.volume > 0))
    numbers = np.arange(math.prod(shape)).reshape(shape)[part.slices()]
    assert row_range(part, shape) == (numbers.min(), numbers.max() + 1)


def test_pieces_that_are_none_are_named() -> None:
    assert "beyond" in gap([Box((0,), (4,))], (3,))
    assert "no piece" in gap([Box((0, 0), (1, 1))], (3,))
    assert "no piece" in gap([Box((-1,), (1,))], (3,))
    assert gap([whole(())], ()) == ""
    assert gap([], ()) == "0 of 1 elements"
