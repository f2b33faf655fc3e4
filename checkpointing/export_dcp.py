"""Writes a committed checkpoint as a folder that `torch.distributed.checkpoint.load` reads."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import ManifestInvalid
from checkpointing.export import Exported, arriving
from checkpointing.leaves import Bytes
from checkpointing.manifest import Manifest
from checkpointing.safetensors import ExportRefused
from checkpointing.spool import spool
from checkpointing.store.base import ObjectStore
from checkpointing.tensors import (
    WholeTensor,
    batches,
    below,
    read_tensors,
    require_objects,
    whole_tensors,
)
from checkpointing.tree import Node, unflatten


def export_dcp(
    store: ObjectStore, manifest: Manifest, folder: Path, *, subtree: str = ""
) -> Exported:
    """Write the state as torch's own writer does: nested as it was, every tensor whole.

    `dcp.load` then reads it into a state dict of the same keys, in any sharding. Tensors are read
    into a mapped file beside the folder, so no more memory is taken than torch needs for one.

    Raises:
        ExportRefused: No torch, nothing to write, or a taken folder.
        RestoreFailed: Bytes fail their CRC.
        ManifestInvalid: The objects are not as the manifest says.
        StoreError: The store could not deliver.
        OSError: No room, or no permission.
    """
    try:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save
    except ImportError as error:
        raise ExportRefused("a dcp folder needs torch: pip install 'everstep[train]'") from error
    tensors = below(whole_tensors(manifest), subtree)
    skeleton = _below(manifest.skeleton, subtree)
    if not tensors or not isinstance(skeleton, dict):
        raise ExportRefused(f"no tensors below {subtree!r}")
    require_objects(store, manifest)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    length = max(_length(tensors), 1)
    with arriving(folder) as place, spool(place / ".tensors", length, keep=False) as held:
        leaves: dict[str, Any] = {}
        for start, batch, offsets in _placed(tensors):
            rooms = [held.room(at, t.nbytes) for t, at in zip(batch, offsets, strict=True)]
            read_tensors(store, manifest, zip(batch, rooms, strict=True))
            held.settle(start, offsets[-1] + batch[-1].nbytes - start)
            leaves |= {t.name: _tensor(t, room) for t, room in zip(batch, rooms, strict=True)}
        state = unflatten(skeleton, leaves)
        for part in reversed([part for part in subtree.split("/") if part]):
            state = {part.replace("~1", "/").replace("~0", "~"): state}
        # One thread: with more, torch 2.13 commits although one of them failed.
        writer = FileSystemWriter(place, thread_count=1)
        with warnings.catch_warnings():  # that there is one process only is as it should be
            warnings.simplefilter("ignore", UserWarning)
            save(state, storage_writer=writer, no_dist=True)
        files = tuple(sorted(file.name for file in place.iterdir()))
        del state, leaves, rooms
    return Exported(folder=folder, files=files, tensors=len(tensors), nbytes=nbytes)


_ALIGN = 64


def _placed(
    tensors: list[WholeTensor],
) -> Iterator[tuple[int, list[WholeTensor], list[int]]]:
    """Yield each batch with its beginning and the offset of each tensor."""
    end = 0
    for batch in batches(tensors):
        start, offsets = end, []
        for tensor in batch:
            offsets.append(end)
            end += -(-tensor.nbytes // _ALIGN) * _ALIGN
        yield start, batch, offsets


def _length(tensors: list[WholeTensor]) -> int:
    return sum(-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors)


def _tensor(tensor: WholeTensor, room: Bytes) -> Any:
    import torch

    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ExportRefused(f"{tensor.name}: this torch has no type {tensor.dtype}")
    if not room.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.from_numpy(room).view(dtype).view(tensor.shape)


def _below(skeleton: Node, subtree: str) -> Node:
    node = skeleton
    for part in (part for part in subtree.split("/") if part):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and node.get("t") == "object":
            node = node["v"]
        if not isinstance(node, dict) or node.get("t") != "dict":
            raise ManifestInvalid(f"{subtree}: {part} is in no mapping")
        by_name: Mapping[str, Node] = {str(k): v for k, v in zip(node["k"], node["v"], strict=True)}
        if name not in by_name:
            return None
        node = by_name[name]
    return node
