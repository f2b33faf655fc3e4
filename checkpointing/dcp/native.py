"""A checkpoint of the engine's own, as DCP sees it: flat keys, chunks, and values at hand."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing.dcp import values
from checkpointing.dcp.document import Chunk, StoredObject
from checkpointing.errors import ManifestInvalid, ObjectMissing
from checkpointing.manifest import Manifest
from checkpointing.plan import Extent
from checkpointing.resolver import CommitInfo, find_commit, list_commits
from checkpointing.store.base import ObjectStore
from checkpointing.tree import unflatten


@dataclass(frozen=True, slots=True)
class Inline:
    """A Python value that the manifest itself holds."""

    value: Any


def find(store: ObjectStore, run: str, step: int | None) -> CommitInfo:
    """Return the commit of a step, or the newest one that may be used.

    Raises:
        ObjectMissing: There is none.
    """
    if step is not None:
        return find_commit(store, run, step)
    commits = list_commits(store, run, verified=1)
    if not commits:
        raise ObjectMissing(f"{run}: no checkpoint that may be used is committed")
    return commits[0]


def metadata_of(manifest: Manifest) -> Metadata:
    """Return what DCP needs to know; `storage_data` holds a `Chunk` or `Inline` for every item.

    Raises:
        ManifestInvalid: Tensors in tuples, which DCP takes for one value each.
    """
    by_name: dict[str, list[Extent]] = {}
    for extent in manifest.tensors:
        by_name.setdefault(extent.name, []).append(extent)
    leaves = {name: torch.empty(0, device="meta") for name in by_name}
    names = {id(leaf): name for name, leaf in leaves.items()}
    flat, paths = flatten_state_dict(unflatten(manifest.skeleton, leaves))
    kinds: dict[str, Any] = {}
    stored: dict[MetadataIndex, Chunk | Inline] = {}
    for key, value in flat.items():
        if isinstance(value, torch.Tensor):
            kinds[key] = _tensor(manifest, key, by_name[names[id(value)]], stored)
        elif _has_tensors(value):
            raise ManifestInvalid(f"{key}: DCP cannot read tensors in a tuple by themselves")
        else:
            kinds[key] = BytesStorageMetadata()
            stored[MetadataIndex(key)] = Inline(value)
    return Metadata(state_dict_metadata=kinds, planner_data=paths, storage_data=stored)


def _tensor(
    manifest: Manifest, key: str, pieces: list[Extent], stored: dict[MetadataIndex, Chunk | Inline]
) -> TensorStorageMetadata:
    chunks = []
    for piece in pieces:
        shard = manifest.shards[piece.owner]
        offsets, sizes = torch.Size(piece.box.start), torch.Size(piece.shape)
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
        stored[MetadataIndex(key, offsets)] = Chunk(
            stored=StoredObject(
                key=shard.data_key, nbytes=shard.data_nbytes, crc64=shard.data_crc64
            ),
            offset=piece.offset,
            nbytes=piece.nbytes,
            crc64=piece.crc64,
            dtype=piece.dtype,
            shape=piece.shape,
            blocks=piece.blocks,
        )
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=values.dtype_named(pieces[0].dtype)),
        size=torch.Size(pieces[0].global_shape),
        chunks=chunks,
    )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, torch.Tensor)
