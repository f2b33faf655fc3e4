"""One number for what a committed checkpoint holds, independent of ranks and layout."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from checkpointing.boxes import whole
from checkpointing.manifest import Manifest, read_manifest
from checkpointing.plan import Extent
from checkpointing.resolver import find_commit
from checkpointing.sources import Part, Wanted, fill_from_store
from checkpointing.store.base import ObjectStore
from checkpointing.tree import Node

_GROUPS: Final = {"model": "weights", "optimizer": "optimizer"}
_BATCH: Final = 256 << 20


def content_sha256(
    store: ObjectStore, run: str, step: int, attempt: int | None = None
) -> dict[str, str]:
    """Return SHA-256 sums over (name, dtype, shape, bytes) of the tensors, sorted by name.

    Without an attempt it is the newest one of the step that is not in quarantine.

    `weights` covers the tensors below `model`, `optimizer` those below `optimizer`, and `all`
    every tensor of the replicated state and its Python values. Every byte is verified on the way.

    Raises:
        RestoreFailed: Bytes fail their CRC.
        StoreError: The checkpoint is not there or cannot be read.
    """
    manifest = read_manifest(store, find_commit(store, run, step, attempt).key)
    sums = {name: hashlib.sha256() for name in ("weights", "optimizer", "all")}
    for batch in _batches(_tensors(manifest)):
        for tensor in _read(store, manifest, batch):
            head = json.dumps([tensor.name, tensor.dtype, list(tensor.shape)]).encode()
            group = _GROUPS.get(tensor.name.partition("/")[0])
            for name in ("all", group) if group else ("all",):
                sums[name].update(head)
                sums[name].update(tensor.data.data)
    sums["all"].update(json.dumps(_plain(manifest.skeleton), sort_keys=True).encode())
    return {name: digest.hexdigest() for name, digest in sums.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A whole tensor of a checkpoint, put together from its pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Extent, ...]
    data: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return sum(piece.nbytes for piece in self.pieces)


def _tensors(manifest: Manifest) -> Iterator[_Tensor]:
    by_name: dict[str, list[Extent]] = {}
    for extent in manifest.tensors:
        by_name.setdefault(extent.name, []).append(extent)
    for name in sorted(by_name):
        first = by_name[name][0]
        yield _Tensor(
            name=name,
            dtype=first.dtype,
            shape=first.global_shape,
            pieces=tuple(by_name[name]),
            data=np.empty(0, dtype=np.uint8),
        )


def _read(store: ObjectStore, manifest: Manifest, batch: Iterable[_Tensor]) -> list[_Tensor]:
    tensors = [replace(t, data=np.empty(t.nbytes, dtype=np.uint8)) for t in batch]
    wanted: list[Wanted] = []
    parts: list[Part] = []
    for tensor in tensors:
        for piece in tensor.pieces:
            key = manifest.shards[piece.owner].data_key
            if not piece.nbytes:
                continue
            if piece.box == whole(tensor.shape):
                wanted.append(Wanted(extent=piece, key=key, out=tensor.data))
                continue
            items = tensor.data.view(f"V{piece.nbytes // piece.box.volume}").reshape(tensor.shape)
            out = items[piece.box.slices()]
            parts.append(Part(extent=piece, key=key, box=whole(piece.shape), out=out))
    fill_from_store(store, wanted, parts)
    return tensors


def _plain(node: Node) -> Node:
    """Return a skeleton that does not tell a sharded tensor from a whole one."""
    if isinstance(node, dict) and node["t"] == "shard":
        return {**node, "t": "tensor"}
    if isinstance(node, dict) and node["t"] == "object":
        return {**node, "v": _plain(node["v"])}
    if isinstance(node, dict) and node["t"] in ("dict", "list", "tuple"):
        return {**node, "v": [_plain(child) for child in node["v"]]}
    return node


def _batches(tensors: Iterable[_Tensor]) -> Iterator[list[_Tensor]]:
    """Cut into batches of bounded memory."""
    batch: list[_Tensor] = []
    for tensor in tensors:
        if batch and sum(t.nbytes for t in batch) + tensor.nbytes > _BATCH:
            yield batch
            batch = []
        batch.append(tensor)
    if batch:
        yield batch
