"""What differs between two committed checkpoints, tensor by tensor."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from checkpointing import dtypes
from checkpointing.leaves import Bytes
from checkpointing.manifest import Manifest
from checkpointing.store.base import ObjectStore
from checkpointing.tensors import (
    WholeTensor,
    batches,
    below,
    read_batch,
    require_objects,
    whole_tensors,
)
from checkpointing.tree import LEAVES, Node

_BATCH: Final = 128 << 20
_CHUNK: Final = 1 << 20


class Kind(StrEnum):
    """How a tensor or a value compares."""

    EQUAL = "equal"
    CHANGED = "changed"
    OTHER_TYPE = "other_type"
    ONLY_FIRST = "only_first"
    ONLY_SECOND = "only_second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one tensor compares.

    Attributes:
        name: Path in the state.
        kind: How.
        detail: One line: types and shapes, where those differ.
        elements: Elements that are not the same bits, of `CHANGED`.
        total: All elements.
        max_abs: Largest absolute difference among pairs of finite elements; None when there are
            none, or when the type has no numbers.
        non_finite: Elements that are infinite or not a number in one of both.
    """

    name: str
    kind: Kind
    detail: str = ""
    elements: int = 0
    total: int = 0
    max_abs: float | None = None
    non_finite: int = 0


def compare(
    store: ObjectStore, first: Manifest, second: Manifest, subtree: str = ""
) -> Iterator[Difference]:
    """Compare by name; bytes are read only where sums cannot tell that they are the same.

    Raises:
        RestoreFailed: Bytes fail their CRC.
        StoreError: The store could not deliver.
    """
    ours = {t.name: t for t in below(whole_tensors(first), subtree)}
    theirs = {t.name: t for t in below(whole_tensors(second), subtree)}
    unsure = []
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            kind = Kind.ONLY_SECOND if one is None else Kind.ONLY_FIRST
            yield Difference(name=name, kind=kind, detail=_type(one or other))
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            detail = f"{_type(one)} against {_type(other)}"
            yield Difference(name=name, kind=Kind.OTHER_TYPE, detail=detail)
        elif _sums(one) == _sums(other):
            yield Difference(name=name, kind=Kind.EQUAL)
        else:
            unsure.append(one)
    if unsure:
        require_objects(store, first)
        require_objects(store, second)
    for batch in batches(unsure, _BATCH):
        left = read_batch(store, first, batch)
        right = read_batch(store, second, [theirs[tensor.name] for tensor in batch])
        for tensor, a, b in zip(batch, left, right, strict=True):
            yield _compared(tensor, a, b)


def compare_values(first: Node, second: Node) -> Iterator[tuple[str, str, str]]:
    """Yield (path, first, second) of the Python values that differ, "-" for what is not there."""
    ours, theirs = dict(python_values(first)), dict(python_values(second))
    for path in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(path, "-"), theirs.get(path, "-")
        if one != other:
            yield path, one, other


def python_values(node: Node, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, text) of every Python value of a state."""
    if not isinstance(node, dict):
        yield path, repr(node)
    elif node["t"] in LEAVES:
        return
    elif node["t"] == "object":
        yield from python_values(node["v"], path)
    elif node["t"] == "dict":
        for key, child in zip(node["k"], node["v"], strict=True):
            yield from python_values(child, f"{path}/{key}" if path else str(key))
    elif node["t"] in ("list", "tuple"):
        for number, child in enumerate(node["v"]):
            yield from python_values(child, f"{path}/{number}" if path else str(number))
    else:
        yield path, node["v"]


def _compared(tensor: WholeTensor, a: Bytes, b: Bytes) -> Difference:
    if np.array_equal(a, b):
        return Difference(name=tensor.name, kind=Kind.EQUAL)
    total = int(np.prod(tensor.shape, dtype=np.int64))
    size = a.nbytes // total
    different = sum(
        int(np.count_nonzero((x.reshape(-1, size) != y.reshape(-1, size)).any(axis=1)))
        for x, y in _chunks(a, b, size)
    )
    largest: float | None = None
    odd = 0
    if dtypes.is_number(tensor.dtype):
        for x, y in _chunks(a, b, size):
            distance, count = _distance(x, y, tensor.dtype)
            odd += count
            if distance is not None:
                largest = distance if largest is None else max(largest, distance)
    return Difference(
        name=tensor.name,
        kind=Kind.CHANGED,
        elements=different,
        total=total,
        max_abs=largest,
        non_finite=odd,
    )


def _distance(x: Bytes, y: Bytes, dtype: str) -> tuple[float | None, int]:
    a, b = dtypes.values(x, dtype), dtypes.values(y, dtype)
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    with np.errstate(invalid="ignore"):  # NaNs that signal
        a, b = a.astype(wide), b.astype(wide)
    finite: NDArray[np.bool_] = np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return None, finite.size
    with np.errstate(over="ignore"):
        largest = min(float(np.abs(a[finite] - b[finite]).max()), sys.float_info.max)
    return largest, int(finite.size - np.count_nonzero(finite))


def _chunks(a: Bytes, b: Bytes, size: int) -> Iterable[tuple[Bytes, Bytes]]:
    step = _CHUNK // size * size
    for at in range(0, a.nbytes, step):
        yield a[at : at + step], b[at : at + step]


def _sums(tensor: WholeTensor) -> list[tuple[Any, int]]:
    return sorted((piece.box, piece.crc64) for piece in tensor.pieces)


def _type(tensor: WholeTensor | None) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if tensor else ""
