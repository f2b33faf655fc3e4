"""The average of the weights of several checkpoints, as a checkpoint of its own kind.

It is committed below `averages/` of its run, where nobody looks for something to resume from, and
its manifest says what it is the average of.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from checkpointing import dtypes, keys
from checkpointing.checksum import combine, crc64
from checkpointing.commit import CommitOutcome, UploadRecord, commit
from checkpointing.errors import CheckpointingError, ObjectConflict
from checkpointing.manifest import Index, Manifest, skeleton_crc64
from checkpointing.mean import write_means
from checkpointing.plan import Extent
from checkpointing.spool import Spool, spool
from checkpointing.store.base import ObjectStore
from checkpointing.tensors import (
    WholeTensor,
    below,
    require_objects,
    whole_tensors,
)
from checkpointing.tree import LEAVES, Node

_PART: Final = 16 << 20


class AverageRefused(CheckpointingError):
    """These checkpoints have no average; one line says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """An average that is in the store.

    Attributes:
        run: Name to read it by, as if it were a run.
        label: Its label.
        of: (step, attempt) of what it is the average of, newest first.
        tensors: How many tensors were averaged.
        copied: How many were taken from the newest one: they hold no floats.
        outcome: What became of the commit.
    """

    run: str
    label: str
    of: tuple[tuple[int, int], ...]
    tensors: int
    copied: int
    outcome: CommitOutcome


def average(
    store: ObjectStore,
    run: str,
    manifests: Sequence[Manifest],
    *,
    label: str,
    subtree: str = "model",
    dtype: str | None = None,
    scratch: Path | None = None,
) -> Averaged:
    """Average the weights of checkpoints in float64 and commit the result.

    The sum is rounded once, to the stored type or to `dtype`. Memory is bounded whatever the size
    of the tensors: large ones are added up in a mapped file, as the result is that is uploaded.

    Args:
        store: Holds the checkpoints and gets the average.
        run: Name of the run.
        manifests: Of the checkpoints, newest first.
        label: Names the average below the run's averages.
        subtree: Where the weights are.
        dtype: Floating type of the result, None for that of each tensor.
        scratch: Folder with room for the result, None for the system's.

    Raises:
        AverageRefused: They do not fit together, or hold what cannot be averaged.
        ObjectConflict: The label is taken by the average of others at the same step.
        RestoreFailed: Bytes fail their CRC.
        StoreError: The store could not deliver or take it.
    """
    if not manifests:
        raise AverageRefused("no checkpoints to average")
    if dtype is not None and not dtypes.is_floating(dtype):
        raise AverageRefused(f"{dtype}: is no floating type")
    columns = _columns(manifests, subtree)
    for manifest in manifests:
        require_objects(store, manifest)
    newest, target = manifests[0], keys.average_run(run, label)
    of = tuple((m.step, m.attempt) for m in manifests)
    extents = _lay_out([column[0] for column in columns], dtype)
    record = _add_up(store, target, manifests, columns, extents, scratch)
    outcome = commit(
        store,
        target,
        newest.step,
        newest.attempt,
        [record],
        world=1,
        write_id=f"{target}/{newest.attempt}/{newest.step}",
        average_of=of,
        tokens=newest.tokens,
    )
    copied = sum(not dtypes.is_floating(column[0].dtype) for column in columns)
    return Averaged(
        run=target,
        label=label,
        of=of,
        tensors=len(columns) - copied,
        copied=copied,
        outcome=outcome,
    )


def _add_up(
    store: ObjectStore,
    target: str,
    manifests: Sequence[Manifest],
    columns: Sequence[Sequence[WholeTensor]],
    extents: Sequence[Extent],
    scratch: Path | None,
) -> UploadRecord:
    """Write the means to a file, and that to the store."""
    total = sum(extent.nbytes for extent in extents)
    with (
        tempfile.TemporaryDirectory(prefix="everstep-average-", dir=scratch) as folder,
        spool(Path(folder) / "data", max(total, 1), keep=False) as held,
    ):
        extents = write_means(store, manifests, columns, extents, held, Path(folder))
        skeleton = _only(manifests[0].skeleton, {extent.name for extent in extents}) or _EMPTY
        return _upload(store, target, manifests[0], extents, skeleton, held)


_EMPTY: Final[Node] = {"t": "dict", "k": [], "v": []}


def _columns(manifests: Sequence[Manifest], subtree: str) -> list[list[WholeTensor]]:
    """Return by tensor what each checkpoint has of it, checked to be alike."""
    found = [{t.name: t for t in below(whole_tensors(m), subtree)} for m in manifests]
    if not found[0]:
        raise AverageRefused(f"step {manifests[0].step}: no tensors below {subtree!r}")
    for manifest, tensors in zip(manifests, found, strict=True):
        if odd := sorted(tensors.keys() ^ found[0].keys()):
            raise AverageRefused(
                f"{odd[0]}: not in both of steps {manifests[0].step} and {manifest.step}"
            )
        for name, tensor in tensors.items():
            like = found[0][name]
            if (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
                raise AverageRefused(
                    f"{name}: {like.dtype} {list(like.shape)} at step {manifests[0].step}, "
                    f"{tensor.dtype} {list(tensor.shape)} at step {manifest.step}"
                )
    for name, tensor in found[0].items():
        if tensor.dtype.startswith("complex") or tensor.dtype == "float128":
            raise AverageRefused(f"{name}: {tensor.dtype} cannot be averaged")
    return [[tensors[name] for tensors in found] for name in found[0]]


def _lay_out(tensors: Sequence[WholeTensor], dtype: str | None) -> list[Extent]:
    extents, offset = [], 0
    for tensor in tensors:
        kept = dtype if dtype is not None and dtypes.is_floating(tensor.dtype) else tensor.dtype
        elements = int(np.prod(tensor.shape, dtype=np.int64))
        nbytes = tensor.nbytes if kept == tensor.dtype else elements * dtypes.itemsize(kept)
        extents.append(
            Extent(
                name=tensor.name,
                kind="replica",
                owner=0,
                dtype=kept,
                shape=tensor.shape,
                offset=offset,
                nbytes=nbytes,
            )
        )
        offset += nbytes
    return extents


def _upload(
    store: ObjectStore,
    target: str,
    newest: Manifest,
    extents: Sequence[Extent],
    skeleton: Node,
    held: Spool,
) -> UploadRecord:
    nbytes = sum(extent.nbytes for extent in extents)
    crc = combine((extent.crc64, extent.nbytes) for extent in extents)
    place = (target, newest.step, newest.attempt, 0)
    data_key = keys.data_key(*place) if nbytes else ""
    taken = f"{target}: step {newest.step} has the average of others; choose another label"
    if data_key:
        parts = [held.room(at, min(_PART, nbytes - at)).data for at in range(0, nbytes, _PART)]
        try:
            store.upload(data_key, parts, crc)
        except ObjectConflict as error:
            raise ObjectConflict(taken) from error
    index = Index(
        run=target,
        step=newest.step,
        attempt=newest.attempt,
        rank=0,
        world=1,
        data_key=data_key,
        data_nbytes=nbytes,
        data_crc64=crc,
        skeleton=skeleton,
        skeleton_crc64=skeleton_crc64(skeleton),
        local_skeleton=_EMPTY,
        extents=tuple(extents),
    )
    packed, index_key = index.pack(), keys.index_key(*place)
    if not store.put_if_absent(index_key, packed) and store.get(index_key) != packed:
        raise ObjectConflict(taken)
    return UploadRecord(rank=0, index_key=index_key, index_crc64=crc64(packed))


def _only(node: Node, names: set[str]) -> Node:
    """Return a skeleton with these tensors alone, each whole; None when it has none of them."""
    if not isinstance(node, dict):
        return None
    if node["t"] in LEAVES:
        tag = "tensor" if node["t"] == "shard" else node["t"]
        return {"t": tag, "n": node["n"]} if node["n"] in names else None
    if node["t"] == "object":
        inner = _only(node["v"], names)
        return None if inner is None else {"t": "object", "v": inner}
    if node["t"] == "dict":
        pairs = [(k, _only(v, names)) for k, v in zip(node["k"], node["v"], strict=True)]
        kept = [(key, child) for key, child in pairs if child is not None]
        found: dict[str, Any] = {"t": "dict", "k": [k for k, _ in kept]}
        return {**found, "v": [child for _, child in kept]} if kept else None
    if node["t"] in ("list", "tuple"):
        children = [_only(child, names) for child in node["v"]]
        if all(child is None for child in children):
            return None
        return {"t": node["t"], "v": children}
    return None
