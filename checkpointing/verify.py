"""Reads every byte of a committed checkpoint and names what is broken."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from checkpointing.checksum import combine, crc64
from checkpointing.errors import ManifestInvalid, ObjectCorrupt, ObjectMissing
from checkpointing.manifest import Index, Manifest, Shard, read_index, read_manifest
from checkpointing.plan import Extent
from checkpointing.resolver import CommitInfo
from checkpointing.store.base import ObjectStore
from checkpointing.tensors import missing

_THREADS: Final = 8
_PIECE: Final = 8 << 20  # times the threads is all the memory that bytes take


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a check found.

    Attributes:
        step: Finished steps.
        attempt: Attempt that staged it.
        nbytes: Bytes read.
        tensors: Tensors and pieces of tensors that were checked.
        problems: One line each, naming object and tensor; () for a sound checkpoint.
    """

    step: int
    attempt: int
    nbytes: int
    tensors: int
    problems: tuple[str, ...]


def verify(store: ObjectStore, commit: CommitInfo) -> Verified:
    """Check the manifest, each index, and each byte of the data against all sums.

    Raises:
        StoreError: The store could not be asked; that says nothing of the checkpoint.
    """
    found = _verify(store, commit)
    # What was altered on the way only is not altered when it comes a second time.
    return _verify(store, commit) if found.problems else found


def _verify(store: ObjectStore, commit: CommitInfo) -> Verified:
    step, attempt = commit.place

    def found(problems: Sequence[str], nbytes: int = 0, tensors: int = 0) -> Verified:
        return Verified(
            step=step, attempt=attempt, nbytes=nbytes, tensors=tensors, problems=tuple(problems)
        )

    try:
        manifest = read_manifest(store, commit.key)
    except (ManifestInvalid, ObjectMissing) as error:
        return found([str(error)])
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        looked = list(pool.map(lambda shard: _look(store, manifest, shard), manifest.shards))
        problems = [problem for _, said in looked for problem in said]
        problems += _agreement(manifest, [index for index, _ in looked])
        tasks = [
            task
            for shard, (index, said) in zip(manifest.shards, looked, strict=True)
            if index is not None and not said
            for task in _tasks(shard, index)
        ]
        results = list(pool.map(lambda task: _sums(store, task), tasks))
    by_rank: dict[int, list[tuple[_Task, list[int] | str]]] = {}
    for task, result in zip(tasks, results, strict=True):
        by_rank.setdefault(task.rank, []).append((task, result))
    for rank, done in by_rank.items():
        problems += _compare(manifest.shards[rank], done)
    read = sum(length for task in tasks for _, _, length in task.spans)
    count = sum(len(index.extents) for index, _ in looked if index is not None)
    return found(problems, read, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Neighbouring bytes of an object.

    Attributes:
        rank: Whose object it is.
        key: The object.
        start: Where it begins.
        spans: Extent, which block of it, and length, one after the other.
    """

    rank: int
    key: str
    start: int
    spans: tuple[tuple[Extent, int, int], ...]


def _look(store: ObjectStore, manifest: Manifest, shard: Shard) -> tuple[Index | None, list[str]]:
    try:
        index = read_index(store, shard.index_key, shard.index_crc64)
    except ObjectMissing:
        return None, [f"{shard.index_key}: does not exist"]
    except ManifestInvalid as error:
        return None, [str(error)]
    place = (index.run, index.step, index.attempt, index.rank, index.world)
    wanted = (manifest.run, manifest.step, manifest.attempt, shard.rank, manifest.world)
    held = (index.data_key, index.data_nbytes, index.data_crc64)
    if place != wanted or held != (shard.data_key, shard.data_nbytes, shard.data_crc64):
        return index, [f"{shard.index_key}: is of another checkpoint than its manifest"]
    end = 0
    for extent in _stored(index):
        if extent.offset != end:
            return index, [f"{shard.index_key}: bytes {end} to {extent.offset} are of no tensor"]
        end += extent.nbytes
    if end != shard.data_nbytes:
        return index, [f"{shard.index_key}: says nothing of the bytes from {end} on"]
    problem = missing(store, shard)
    return index, [problem] if problem else []


def _agreement(manifest: Manifest, indexes: Sequence[Index | None]) -> Iterator[str]:
    """Compare what the manifest says of tensors with what the indexes say."""
    said = {
        (index.rank, extent.offset, extent.name): extent
        for index in indexes
        if index is not None
        for extent in index.extents
    }
    for tensor in manifest.tensors:
        index = indexes[tensor.owner]
        if index is not None and said.get((tensor.owner, tensor.offset, tensor.name)) != tensor:
            yield f"{tensor.name}: manifest and index of rank {tensor.owner} do not agree"


def _stored(index: Index) -> list[Extent]:
    own = [extent for extent in index.extents if extent.offset >= 0]
    return sorted(own, key=lambda extent: (extent.offset, extent.nbytes))


def _tasks(shard: Shard, index: Index) -> Iterator[_Task]:
    spans: list[tuple[Extent, int, int]] = []
    start = end = 0
    for extent in _stored(index):
        for number, at in enumerate(range(0, extent.nbytes, _PIECE)):
            length = min(_PIECE, extent.nbytes - at)
            if end + length - start > _PIECE and spans:
                yield _Task(rank=shard.rank, key=shard.data_key, start=start, spans=tuple(spans))
                spans, start = [], end
            spans.append((extent, number, length))
            end += length
    if spans:
        yield _Task(rank=shard.rank, key=shard.data_key, start=start, spans=tuple(spans))


def _sums(store: ObjectStore, task: _Task) -> list[int] | str:
    """Return the CRC of each span, or why there is none."""
    block = np.empty(sum(length for _, _, length in task.spans), dtype=np.uint8)
    try:
        store.read_into(task.key, task.start, block.data)
    except (ObjectMissing, ObjectCorrupt) as error:
        return str(error)
    found, at = [], 0
    for _, _, length in task.spans:
        found.append(crc64(block[at : at + length].data))
        at += length
    return found


def _compare(shard: Shard, done: Sequence[tuple[_Task, list[int] | str]]) -> Iterator[str]:
    """Compare the sums of extents, then that of the object, with what was recorded."""
    pieces: list[tuple[int, int]] = []
    by_extent: dict[int, tuple[Extent, list[tuple[int, int]]]] = {}
    for task, result in done:
        if isinstance(result, str):
            yield result
            return
        for (extent, _, length), crc in zip(task.spans, result, strict=True):
            pieces.append((crc, length))
            by_extent.setdefault(extent.offset, (extent, []))[1].append((crc, length))
    spoilt = [e for e, sums in by_extent.values() if combine(sums) != e.crc64]
    for extent in spoilt:
        first, last = extent.offset, extent.offset + extent.nbytes - 1
        yield f"{extent.name}: bytes {first} to {last} of {shard.data_key} fail their CRC"
    if not spoilt and combine(pieces) != shard.data_crc64:
        yield f"{shard.data_key}: fails its CRC, though its tensors do not"
