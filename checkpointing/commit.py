"""Turns the uploads of all ranks into a committed checkpoint, or says why not."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from checkpointing import keys
from checkpointing.boxes import Box, gap
from checkpointing.errors import CommitRefused, ManifestInvalid, ObjectMissing, StoreUnavailable
from checkpointing.manifest import Index, Manifest, Shard, read_index, read_manifest
from checkpointing.plan import Extent
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
    _all_ranks(uploads, world)
    ordered = sorted(uploads, key=lambda upload: upload.rank)
    indexes = _each(lambda upload: _index(store, run, step, attempt, world, upload), ordered)
    tensors = (*_replicas(indexes), *_pieces(indexes))
    for index in indexes:
        _object_is_covered(index)
    _each(lambda index: _object_exists(store, index), indexes)
    manifest = Manifest(
        run=run,
        step=step,
        attempt=attempt,
        world=world,
        write_id=write_id,
        nbytes=sum(index.data_nbytes for index in indexes),
        shards=tuple(_shard(u, i) for u, i in zip(ordered, indexes, strict=True)),
        skeleton=indexes[0].skeleton,
        tensors=tensors,
        average_of=average_of,
        tokens=tokens,
    )
    return _write(store, manifest)


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


def _all_ranks(uploads: Sequence[UploadRecord], world: int) -> None:
    reported = [upload.rank for upload in uploads]
    missing = sorted(set(range(world)) - set(reported))
    if missing:
        raise CommitRefused(f"no upload from {_ranks(missing)} of {world}")
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


def _replicas(indexes: Sequence[Index]) -> tuple[Extent, ...]:
    """Check that all ranks staged the same state and one uploads each tensor; return those."""
    crcs = {index.skeleton_crc64 for index in indexes}
    if len(crcs) > 1:
        ranks = [i.rank for i in indexes if i.skeleton_crc64 != indexes[0].skeleton_crc64]
        raise CommitRefused(
            f"structure or Python values of the replicated state differ between rank 0 and "
            f"{_ranks(ranks)}"
        )
    by_name: dict[str, list[tuple[int, Extent]]] = defaultdict(list)
    for index in indexes:
        for extent in index.extents:
            if extent.kind == "replica":
                by_name[extent.name].append((index.rank, extent))
    return tuple(_replica(name, copies, len(indexes)) for name, copies in by_name.items())


def _replica(name: str, copies: list[tuple[int, Extent]], world: int) -> Extent:
    ranks = [rank for rank, _ in copies]
    if sorted(ranks) != list(range(world)):
        absent = sorted(set(range(world)) - set(ranks))
        raise CommitRefused(f"{name}: not exactly once on every rank (absent: {_ranks(absent)})")
    for what, values in (
        ("owner", [extent.owner for _, extent in copies]),
        ("dtype", [extent.dtype for _, extent in copies]),
        ("shape", [extent.shape for _, extent in copies]),
        ("content", [extent.crc64 for _, extent in copies]),
    ):
        _agree(name, what, ranks, values)
    uploaded = [(rank, extent) for rank, extent in copies if extent.offset >= 0]
    if [rank for rank, _ in uploaded] != [copies[0][1].owner]:
        holders = _ranks([rank for rank, _ in uploaded])
        raise CommitRefused(f"{name}: uploaded by {holders}, not by its owner alone")
    return uploaded[0][1]


def _pieces(indexes: Sequence[Index]) -> tuple[Extent, ...]:
    """Check that the pieces of each sharded tensor make it whole, once; return what is uploaded."""
    by_name: dict[str, list[tuple[int, Extent]]] = defaultdict(list)
    for index in indexes:
        for extent in index.extents:
            if extent.kind == "shard":
                by_name[extent.name].append((index.rank, extent))
    return tuple(piece for name, found in by_name.items() for piece in _whole(name, found))


def _whole(name: str, found: list[tuple[int, Extent]]) -> list[Extent]:
    ranks = [rank for rank, _ in found]
    _agree(name, "dtype", ranks, [extent.dtype for _, extent in found])
    _agree(name, "shape of the whole", ranks, [extent.whole for _, extent in found])
    by_box: dict[Box, list[tuple[int, Extent]]] = defaultdict(list)
    for rank, extent in found:
        if extent.nbytes:
            by_box[extent.box].append((rank, extent))
    chosen = []
    for box, copies in by_box.items():
        holders = [rank for rank, _ in copies]
        _agree(f"{name} at {box.start}", "content", holders, [e.crc64 for _, e in copies])
        uploaded = [extent for _, extent in copies if extent.offset >= 0]
        if not uploaded:
            raise CommitRefused(f"{name} at {box.start}: on {_ranks(holders)}, uploaded by nobody")
        # Several upload it when its mesh does not tell: that of FSDP does not know those of TP.
        chosen.append(uploaded[0])
    problem = gap(list(by_box), found[0][1].whole)
    if problem:
        raise CommitRefused(f"{name}: its pieces do not make it whole: {problem}")
    if not chosen:  # a tensor without elements has to be known all the same
        chosen = [extent for _, extent in found if extent.offset >= 0][:1]
    return chosen


def _agree(name: str, what: str, ranks: Sequence[int], values: Sequence[object]) -> None:
    groups: dict[object, list[int]] = defaultdict(list)
    for rank, value in zip(ranks, values, strict=True):
        groups[value].append(rank)
    if len(groups) > 1:
        sides = sorted(groups.values(), key=len, reverse=True)
        raise CommitRefused(f"{name}: {what} differs: {' against '.join(map(_ranks, sides))}")


def _object_is_covered(index: Index) -> None:
    """Check that a rank's extents fill its object exactly once, its own state among them."""
    lost = [extent.name for extent in index.extents if extent.kind == "local" and extent.offset < 0]
    if lost:
        raise CommitRefused(f"{lost[0]}: own state of rank {index.rank}, uploaded by nobody")
    end = 0
    for extent in sorted((e for e in index.extents if e.offset >= 0), key=_place):
        if extent.offset != end or extent.owner != index.rank:
            raise CommitRefused(
                f"{extent.name}: at byte {extent.offset} of rank {index.rank}, expected {end}"
            )
        end += extent.nbytes
    if end != index.data_nbytes:
        raise CommitRefused(
            f"rank {index.rank}: extents end at byte {end} of an object of {index.data_nbytes}"
        )


def _place(extent: Extent) -> tuple[int, int]:
    return extent.offset, extent.nbytes


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


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}" if ranks else "no rank"
