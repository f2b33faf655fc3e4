"""A rank's piece of a tensor that no rank has whole, and how DTensors are read as such."""

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from checkpointing.boxes import Box


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharded:
    """A piece of a global tensor, as a leaf of a state.

    Experts of a mixture lie on the ranks by their global number: rank r with experts 4..7 of 16
    gives `Sharded(local=w, shape=(16, *w.shape[1:]), start=(4, 0, 0))`.

    Attributes:
        local: The piece: a plain tensor or array, filled in place by a restore.
        shape: Shape of the whole.
        start: Where the piece begins in the whole.
        copy: Which of the `copies` ranks with the same piece this is; one of them uploads it.
        copies: How many ranks have the same piece.
    """

    local: Any
    shape: tuple[int, ...]
    start: tuple[int, ...]
    copy: int = 0
    copies: int = 1

    def __post_init__(self) -> None:
        piece = tuple(int(n) for n in self.local.shape)
        if not len(piece) == len(self.shape) == len(self.start):
            raise ValueError(f"a piece of shape {piece} at {self.start} is none of {self.shape}")
        stop = Box(self.start, piece).stop
        if any(a < 0 for a in self.start) or any(
            b > n for b, n in zip(stop, self.shape, strict=True)
        ):
            raise ValueError(f"a piece of shape {piece} at {self.start} is beyond {self.shape}")
        if not 0 <= self.copy < self.copies:
            raise ValueError(f"copy {self.copy} of {self.copies}")

    @property
    def box(self) -> Box:
        """The piece in the coordinates of the whole."""
        return Box(self.start, tuple(int(n) for n in self.local.shape))


def is_sharded(value: object) -> bool:
    """Tell a `Sharded` or a DTensor, without importing torch."""
    exact: Any = type(value)
    return _is_type_of_pieces(exact)


def as_sharded(value: Any) -> Sharded:
    """Return a leaf as a piece; a DTensor shows its local tensor, which is not copied.

    Raises:
        TypeError: A DTensor that is not what it stands for yet (`Partial`).
    """
    if isinstance(value, Sharded):
        return value
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = value.device_mesh, value.placements
    if any(placement.is_partial() for placement in placements):
        raise TypeError("a DTensor with a Partial placement: redistribute it before saving")
    shape = tuple(int(n) for n in value.shape)
    _, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    local = value.to_local()
    coordinate = mesh.get_coordinate()
    copy, copies = 0, 1
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            copy = copy * mesh.size(dim) + (coordinate[dim] if coordinate else 0)
            copies *= mesh.size(dim)
    if coordinate is None:  # a mesh of other ranks: nothing of it lies here
        local = local.new_empty((0,) * len(shape))
    start = offset if local.numel() else (0,) * len(shape)
    return Sharded(
        local=local,
        shape=shape,
        start=tuple(int(n) for n in start),
        copy=copy,
        copies=copies,
    )


@cache
def _is_type_of_pieces(exact: type) -> bool:
    """Tell by the type, once: a DTensor has none before its module is there."""
    module = sys.modules.get("torch.distributed.tensor")
    return issubclass(exact, Sharded) or (module is not None and issubclass(exact, module.DTensor))
