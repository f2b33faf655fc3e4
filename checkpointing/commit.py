"""Turns the uploads of all ranks into a committed checkpoint, or says why not."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np

from checkpointing import keys
from checkpointing.alike import ranks_text, replicas
from checkpointing.errors import CommitRefused, ManifestInvalid, ObjectMissing, StoreUnavailable
from checkpointing.extents import LOCAL, SHARD, Extents, join
from checkpointing.manifest import Index, Manifest, Shard, read_index, read_manifest
from checkpointing.pieces import Pieces
from checkpointing.store.base import ObjectStore

_THREADS: Final = 8
_In = TypeVar("_In")
_Out = TypeVar("_Out")


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRecord:
    """What a rank's uploader reported."""

    rank: int
    index_key: str
    index_crc64: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOutcome:
    """What became of a commit.

    Attributes:
        committed: The checkpoint of this attempt is committed.
        already: There was a manifest for this step and attempt before.
        manifest_key: Its key.
        nbytes: Bytes of the checkpoint.
        why: One line for a person.
    """

    committed: bool
    already: bool
    manifest_key: str
    nbytes: int
    why: str


def commit(
    store: ObjectStore,
    run: str,
    step: int,
    attempt: int,
    uploads: Sequence[UploadRecord],
    world: int,
    write_id: str,
    average_of: tuple[tuple[int, int], ...] = (),
    tokens: int | None = None,
) -> CommitOutcome:
    """Check everything, then write the manifest, last and once.

    Args:
        store: Where the uploads are.
        run: Name of the run.
        step: Finished steps.
        attempt: Attempt that staged them.
        uploads: One per rank.
        world: Ranks in the attempt.
        write_id: Unique to this decision to commit; the same one may be tried again.
        average_of: (step, attempt) of what it is the average of, () for a checkpoint of a run.
        tokens: Tokens trained until then, None when not known.

    Raises:
        CommitRefused: The uploads do not make one consistent checkpoint.
        StoreError: The store could not be asked.
    """
    _allranks_text(uploads, world)
    ordered = sorted(uploads, key=lambda upload: upload.rank)
    indexes = _each(lambda upload: _index(store, run, step, attempt, world, upload), ordered)
    tensors = join([replicas(indexes), _pieces(indexes)])
    for index in indexes:
        _object_is_covered(index)
    _each(lambda index: _object_exists(store, index), indexes)
    shards = tuple(_shard(u, i) for u, i in zip(ordered, indexes, strict=True))
    found = _manifest(indexes, shards, tensors, write_id)
    return _write(store, replace(found, average_of=average_of, tokens=tokens))


def _manifest(
    indexes: Sequence[Index], shards: tuple[Shard, ...], tensors: Extents, write_id: str
) -> Manifest:
    first = indexes[0]
    return Manifest(
        run=first.run,
        step=first.step,
        attempt=first.attempt,
        world=first.world,
        write_id=write_id,
        nbytes=sum(index.data_nbytes for index in indexes),
        shards=shards,
        skeleton=first.skeleton,
        tensors=tensors,
    )


def _write(store: ObjectStore, manifest: Manifest) -> CommitOutcome:
    key = keys.manifest_key(manifest.run, manifest.step, manifest.attempt)

    def outcome(committed: bool, already: bool, why: str) -> CommitOutcome:
        return CommitOutcome(
            committed=committed,
            already=already,
            manifest_key=key,
            nbytes=manifest.nbytes,
            why=why,
        )

    lost: StoreUnavailable | None = None
    try:
        if store.put_if_absent(key, manifest.pack()):
            return outcome(committed=True, already=False, why="committed")
    except StoreUnavailable as error:
        lost = error  # the put may have landed and only its answer be lost
    try:
        found = read_manifest(store, key)
    except ObjectMissing:
        raise lost or StoreUnavailable(f"{key}: exists and does not") from lost
    except ManifestInvalid as error:
        raise CommitRefused(f"the key of the manifest is taken: {error}") from error
    if found.write_id == manifest.write_id:
        return outcome(committed=True, already=lost is None, why="committed, settled by reading")
    if found.shards != manifest.shards:
        why = f"step {found.step} of attempt {found.attempt} is committed from other uploads"
        return outcome(committed=False, already=True, why=why)
    return outcome(committed=True, already=True, why="committed before by another writer")


def _allranks_text(uploads: Sequence[UploadRecord], world: int) -> None:
    reported = [upload.rank for upload in uploads]
    missing = sorted(set(range(world)) - set(reported))
    if missing:
        raise CommitRefused(f"no upload from {ranks_text(missing)} of {world}")
    if len(reported) != world:
        raise CommitRefused(f"{len(reported)} uploads for {world} ranks")


def _index(
    store: ObjectStore, run: str, step: int, attempt: int, world: int, upload: UploadRecord
) -> Index:
    try:
        index = read_index(store, upload.index_key, upload.index_crc64)
    except (ManifestInvalid, ObjectMissing) as error:
        raise CommitRefused(f"index of rank {upload.rank}: {error}") from error
    wanted = (run, step, attempt, upload.rank, world)
    found = (index.run, index.step, index.attempt, index.rank, index.world)
    if found != wanted:
        raise CommitRefused(
            f"index of rank {upload.rank} is for (run, step, attempt, rank, world) {found}, "
            f"not {wanted}"
        )
    return index


def _pieces(indexes: Sequence[Index]) -> Extents:
    """Check that the pieces of each sharded tensor make it whole, once; return what is uploaded."""
    columns = [Extents.of(index.extents) for index in indexes]
    found = join([own.rows(own.kind == SHARD) for own in columns])
    counts = [int((own.kind == SHARD).sum()) for own in columns]
    holder = np.repeat([index.rank for index in indexes], counts).tolist()
    return found.rows(np.array(Pieces(found, holder).chosen(), np.intp))


def _object_is_covered(index: Index) -> None:
    """Check that a rank's extents fill its object exactly once, its own state among them."""
    extents = Extents.of(index.extents)
    lost = (extents.kind == LOCAL) & (extents.offset < 0)
    if lost.any():
        name = extents.names[int(np.argmax(lost))]
        raise CommitRefused(f"{name}: own state of rank {index.rank}, uploaded by nobody")
    stored = np.flatnonzero(extents.offset >= 0)
    sizes = extents.nbytes
    stored = stored[np.lexsort((sizes[stored], extents.offset[stored]))]
    expected = np.cumsum(sizes[stored]) - sizes[stored]
    wrong = (extents.offset[stored] != expected) | (extents.owner[stored] != index.rank)
    if wrong.any():
        place = int(np.argmax(wrong))
        number = int(stored[place])
        raise CommitRefused(
            f"{extents.names[number]}: at byte {extents.offset[number]} of rank {index.rank}, "
            f"expected {expected[place]}"
        )
    if (end := int(sizes[stored].sum())) != index.data_nbytes:
        raise CommitRefused(
            f"rank {index.rank}: extents end at byte {end} of an object of {index.data_nbytes}"
        )


def _object_exists(store: ObjectStore, index: Index) -> None:
    if not index.data_key:
        return
    info = store.head(index.data_key)
    if info is None:
        raise CommitRefused(f"rank {index.rank}: {index.data_key} does not exist")
    if info.nbytes != index.data_nbytes:
        raise CommitRefused(
            f"rank {index.rank}: {index.data_key} has {info.nbytes} bytes, not {index.data_nbytes}"
        )
    if info.crc64 is not None and info.crc64 != index.data_crc64:
        raise CommitRefused(f"rank {index.rank}: {index.data_key} has another CRC")


def _shard(upload: UploadRecord, index: Index) -> Shard:
    return Shard(
        rank=index.rank,
        index_key=upload.index_key,
        index_crc64=upload.index_crc64,
        data_key=index.data_key,
        data_nbytes=index.data_nbytes,
        data_crc64=index.data_crc64,
    )


def _each(action: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="commit") as pool:
        return list(pool.map(action, items))
