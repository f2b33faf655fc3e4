"""Turns the items of a plan into objects in the store, and says where each of them is."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from checkpointing import leaves
from checkpointing.checksum import combine, crc64
from checkpointing.dcp import values
from checkpointing.dcp.document import VALUE, Chunk, StoredObject
from checkpointing.store.base import ObjectStore

OBJECT: Final = 1 << 30
"""Bytes of an object; more goes into another, which is copied while this one is sent."""
_STEP: Final = 1 << 20
Batch = list[tuple[WriteItem, str, NDArray[np.uint8]]]
"""Items with the dtype and the bytes of each."""


def _is_value(item: WriteItem) -> bool:
    return item.type is WriteItemType.BYTE_IO


def _packed(item: WriteItem, planner: SavePlanner) -> NDArray[np.uint8]:
    """Return a Python value as JSON; the planner would pickle it."""
    look = getattr(planner, "lookup_object", None)
    if look is None:
        raise TypeError(
            f"{item.index.fqn}: {type(planner).__name__} gives Python values pickled only; use a "
            "planner derived from DefaultSavePlanner"
        )
    return np.frombuffer(values.pack(look(item.index), item.index.fqn), np.uint8)


def pack_values(plan: SavePlan, planner: SavePlanner) -> list[tuple[WriteItem, NDArray[np.uint8]]]:
    """Return the Python values of a plan as JSON.

    Raises:
        TypeError: One would have to be pickled.
    """
    return [(item, _packed(item, planner)) for item in plan.items if _is_value(item)]


def batches(
    packed: Sequence[tuple[WriteItem, NDArray[np.uint8]]], plan: SavePlan, planner: SavePlanner
) -> Iterator[Batch]:
    """Yield what goes into one object each; tensors that are no plain CPU memory are copied.

    Args:
        packed: Its values.
        plan: Names the tensors.
        planner: Has them.

    Raises:
        TypeError: A tensor that cannot be kept as raw bytes.
    """
    batch: Batch = [(item, VALUE, data) for item, data in packed]
    nbytes = sum(data.nbytes for _, _, data in batch)
    for item in plan.items:
        if _is_value(item):
            continue
        dtype, data = _bytes(item, planner)
        if batch and nbytes + data.nbytes > OBJECT:
            yield batch
            batch, nbytes = [], 0
        batch.append((item, dtype, data))
        nbytes += data.nbytes
    if batch:
        yield batch


def _bytes(item: WriteItem, planner: SavePlanner) -> tuple[str, NDArray[np.uint8]]:
    tensor = planner.resolve_data(item)
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{item.index.fqn}: the planner gave a {type(tensor).__name__}")
    tensor = tensor.detach()
    problem = leaves.unsupported(tensor)
    if problem is not None:
        raise TypeError(f"{item.index.fqn}: {problem}")
    if item.tensor_data is not None and tuple(tensor.shape) != tuple(item.tensor_data.chunk.sizes):
        raise TypeError(f"{item.index.fqn}: the planner gave {list(tensor.shape)}, not its plan")
    data = leaves.bytes_of(tensor)
    if data is None:
        data = np.empty(leaves.nbytes_of(tensor), np.uint8)
        leaves.copy_out(tensor, data)
    return leaves.dtype_of(tensor), data


def send(store: ObjectStore, key: str, batch: Batch) -> list[WriteResult]:
    """Upload one object, and say where each item is.

    Raises:
        StoreError: The store could not take it.
    """
    sums = [_sums(data) for _, _, data in batch]
    sizes = [data.nbytes for _, _, data in batch]
    crc = combine(zip((crc for crc, _ in sums), sizes, strict=True))
    stored = StoredObject(key=key, nbytes=sum(sizes), crc64=crc)
    # The CRC goes along: bytes that change from now on are refused.
    store.upload(key, [data.data for _, _, data in batch if data.nbytes], crc)
    results, offset = [], 0
    for (item, dtype, data), (item_crc, blocks) in zip(batch, sums, strict=True):
        shape = tuple(item.tensor_data.chunk.sizes) if item.tensor_data else (data.nbytes,)
        chunk = Chunk(
            stored=stored,
            offset=offset,
            nbytes=data.nbytes,
            crc64=item_crc,
            dtype=dtype,
            shape=shape,
            blocks=blocks,
        )
        results.append(WriteResult(item.index, data.nbytes, chunk))
        offset += data.nbytes
    return results


def _sums(data: NDArray[np.uint8]) -> tuple[int, tuple[int, ...]]:
    """Return the CRC of some bytes, and those of their blocks when there are several."""
    blocks = []
    for begin in range(0, data.nbytes, leaves.BLOCK):
        crc = 0
        for start in range(begin, min(begin + leaves.BLOCK, data.nbytes), _STEP):
            end = min(start + _STEP, begin + leaves.BLOCK, data.nbytes)
            crc = crc64(data[start:end].data, crc)
        blocks.append(crc)
    if len(blocks) < 2:
        return (blocks or [0])[0], ()
    return leaves.combined(blocks, data.nbytes), tuple(blocks)
