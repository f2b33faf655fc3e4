"""One number for what a committed checkpoint holds, independent of ranks and layout."""

import hashlib
import json
from typing import Final

from checkpointing.manifest import read_manifest
from checkpointing.resolver import find_commit
from checkpointing.store.base import ObjectStore
from checkpointing.tensors import batches, read_batch, require_objects, whole_tensors
from checkpointing.tree import Node

_GROUPS: Final = {"model": "weights", "optimizer": "optimizer"}


def content_sha256(
    store: ObjectStore, run: str, step: int, attempt: int | None = None
) -> dict[str, str]:
    """Return SHA-256 sums over (name, dtype, shape, bytes) of the tensors, sorted by name.

    Without an attempt it is the newest one of the step that is not in quarantine.

    `weights` covers the tensors below `model`, `optimizer` those below `optimizer`, and `all`
    every tensor of the replicated state and its Python values. Every byte is verified on the way.

    Raises:
        RestoreFailed: Bytes fail their CRC.
        ManifestInvalid: The manifest is altered, or its objects are not as it says.
        StoreError: The checkpoint is not there or cannot be read.
    """
    manifest = read_manifest(store, find_commit(store, run, step, attempt).key)
    sums = {name: hashlib.sha256() for name in ("weights", "optimizer", "all")}
    require_objects(store, manifest)
    for batch in batches(whole_tensors(manifest)):
        for tensor, data in zip(batch, read_batch(store, manifest, batch), strict=True):
            head = json.dumps([tensor.name, tensor.dtype, list(tensor.shape)]).encode()
            group = _GROUPS.get(tensor.name.partition("/")[0])
            for name in ("all", group) if group else ("all",):
                sums[name].update(head)
                sums[name].update(data.data)
    sums["all"].update(json.dumps(_plain(manifest.skeleton), sort_keys=True).encode())
    return {name: digest.hexdigest() for name, digest in sums.items()}


def _plain(node: Node) -> Node:
    """Return a skeleton that does not tell a sharded tensor from a whole one."""
    if isinstance(node, dict) and node["t"] == "shard":
        return {**node, "t": "tensor"}
    if isinstance(node, dict) and node["t"] == "object":
        return {**node, "v": _plain(node["v"])}
    if isinstance(node, dict) and node["t"] in ("dict", "list", "tuple"):
        return {**node, "v": [_plain(child) for child in node["v"]]}
    return node
