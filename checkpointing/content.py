"""One number for what a committed checkpoint holds, independent of ranks and layout."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from checkpointing import keys
from checkpointing.manifest import Manifest, read_manifest
from checkpointing.plan import Extent
from checkpointing.sources import Wanted, fill_from_store
from checkpointing.store.base import ObjectStore

_GROUPS: Final = {"model": "weights", "optimizer": "optimizer"}
_BATCH: Final = 256 << 20


def content_sha256(store: ObjectStore, run: str, step: int) -> dict[str, str]:
    """Return SHA-256 sums over (name, dtype, shape, bytes) of the tensors, sorted by name.

    `weights` covers the tensors below `model`, `optimizer` those below `optimizer`, and `all`
    every tensor of the replicated state and its Python values. Every byte is verified on the way.

    Raises:
        RestoreFailed: Bytes fail their CRC.
        StoreError: The checkpoint is not there or cannot be read.
    """
    manifest = read_manifest(store, keys.manifest_key(run, step))
    sums = {name: hashlib.sha256() for name in ("weights", "optimizer", "all")}
    for batch in _batches(sorted(manifest.tensors, key=lambda extent: extent.name)):
        for item in _read(store, manifest, batch):
            extent = item.extent
            head = json.dumps([extent.name, extent.dtype, list(extent.shape)]).encode()
            group = _GROUPS.get(extent.name.partition("/")[0])
            for name in ("all", group) if group else ("all",):
                sums[name].update(head)
                sums[name].update(item.out.data)
    sums["all"].update(json.dumps(manifest.skeleton, sort_keys=True).encode())
    return {name: digest.hexdigest() for name, digest in sums.items()}


def _read(store: ObjectStore, manifest: Manifest, batch: Iterable[Extent]) -> list[Wanted]:
    wanted = [
        Wanted(
            extent=extent,
            key=manifest.shards[extent.owner].data_key,
            out=np.empty(extent.nbytes, dtype=np.uint8),
        )
        for extent in batch
    ]
    fill_from_store(store, wanted)
    return wanted


def _batches(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Cut into batches of bounded memory."""
    batch: list[Extent] = []
    for extent in extents:
        if batch and sum(e.nbytes for e in batch) + extent.nbytes > _BATCH:
            yield batch
            batch = []
        batch.append(extent)
    if batch:
        yield batch
