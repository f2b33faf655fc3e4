"""Boxes: pieces of a tensor, each a start and a shape in the coordinates of the whole. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

_MOST_CELLS = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A piece of a tensor; a 0-d tensor has () for both."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index behind it, by dimension."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    def overlap(self, other: "Box") -> "Box | None":
        """Return what both have in common, None for nothing."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def inside(self, outer: "Box") -> "Box":
        """Return the same elements in the coordinates of a box around it."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return what picks it out of an array."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return _whole(tuple(shape))


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def row_range(part: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return the first element and the one behind the last, in row-major order, of a part.

    Elements in between that are not in the part come along: one read instead of many.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(a * s for a, s in zip(part.start, strides, strict=True))
    last = sum((b - 1) * s for b, s in zip(part.stop, strides, strict=True))
    return first, last + 1


def gap(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Say why boxes do not cover a tensor exactly once, "" when they do."""
    full = whole(shape)
    for box in boxes:
        if len(box.start) != len(shape) or min((*box.start, *box.shape), default=0) < 0:
            return f"{box.start} + {box.shape} is no piece of {tuple(shape)}"
        if any(b > n for b, n in zip(box.stop, shape, strict=True)):
            return f"{box.start} + {box.shape} is beyond {tuple(shape)}"
    filled = [box for box in boxes if box.volume]
    total = sum(box.volume for box in filled)
    if total != full.volume:
        return f"{total} of {full.volume} elements"
    return _overlapping(filled, shape)


def _overlapping(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Find two boxes with an element in common, by the cells of the grid that all of them make."""
    edges = [
        sorted({0, size, *(b.start[dim] for b in boxes), *(b.stop[dim] for b in boxes)})
        for dim, size in enumerate(shape)
    ]
    place = [{edge: n for n, edge in enumerate(found)} for found in edges]
    seen: dict[tuple[int, ...], Box] = {}
    for box in boxes:
        for cell in _cells(box, place):
            if cell in seen:
                return (
                    f"{seen[cell].start} + {seen[cell].shape} and {box.start} + {box.shape} overlap"
                )
            seen[cell] = box
            if len(seen) > _MOST_CELLS:
                return f"more than {_MOST_CELLS} pieces"
    return ""


def _cells(box: Box, place: Sequence[dict[int, int]]) -> Iterator[tuple[int, ...]]:
    ranges = [range(at[a], at[b]) for at, a, b in zip(place, box.start, box.stop, strict=True)]
    return product(*ranges)


def split(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return (start, length) of `parts` pieces of a dimension, as `torch.chunk` makes them.

    The last ones are shorter, or empty.
    """
    length = -(-size // parts)
    edges = [min(n * length, size) for n in range(parts + 1)]
    return tuple((a, b - a) for a, b in pairwise(edges))
