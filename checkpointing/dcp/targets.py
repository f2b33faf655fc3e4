"""Pieces of live tensors that a load fills, in place where they are plain CPU memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.planner import ReadItem

from checkpointing.boxes import Box, whole
from checkpointing.dcp import values
from checkpointing.dcp.document import Chunk
from checkpointing.sources import Part, Wanted

_SCRATCH: Final = 1 << 30  # what does not go straight into place is read in batches of this
_SIZED: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A piece of a live tensor and what fills it.

    Attributes:
        item: What DCP wants.
        tensor: The piece.
        scratch: Is filled first and then copied, where the piece cannot be filled by itself.
        source: What is read.
    """

    item: ReadItem
    tensor: torch.Tensor
    scratch: torch.Tensor | None
    source: Wanted | Part


def target_for(item: ReadItem, chunk: Chunk, tensor: torch.Tensor, *, same: bool) -> Target:
    """Return how a piece is filled from a chunk; `same` when their dtypes are."""
    items = _raw_items(tensor) if same else None
    scratch = None
    if items is None:
        scratch = torch.empty(tuple(tensor.shape), dtype=values.dtype_named(chunk.dtype))
        items = _raw_items(scratch)
        assert items is not None
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    extent, key = chunk.extent(item.storage_index.fqn), chunk.stored.key
    source: Wanted | Part = Part(extent=extent, key=key, box=box, out=items)
    if box == whole(chunk.shape) and items.flags.c_contiguous:
        source = Wanted(extent=extent, key=key, out=items.reshape(-1).view(np.uint8))
    return Target(item=item, tensor=tensor, scratch=scratch, source=source)


def _raw_items(tensor: torch.Tensor) -> NDArray[np.void] | None:
    """Return a tensor's elements in place, as so many bytes each; None when they are elsewhere."""
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return None
    size = tensor.element_size()
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), f"V{size}")
    sized = _SIZED.get(size)
    array: NDArray[Any] = (tensor.view(sized) if sized else tensor).numpy()
    items: NDArray[np.void] = array.view(f"V{size}")
    return items


def batches(targets: Iterable[Target]) -> Iterator[list[Target]]:
    """Yield what is read together: as much as there is, but little that has to be copied again."""
    batch: list[Target] = []
    room = 0
    for target in targets:
        size = target.scratch.nbytes if target.scratch is not None else 0
        if batch and room + size > _SCRATCH:
            yield batch
            batch, room = [], 0
        batch.append(target)
        room += size
    if batch:
        yield batch
