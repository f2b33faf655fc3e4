"""The documents of a checkpoint: an index per rank, and the manifest, whose presence is the commit.

Both are JSON with a CRC of their own content, so that a torn or altered one is known as such, and
gzip when they are long. Those of the first format, with an object for each tensor, are read too,
and those of the second, where replicated tensors have no sums of their blocks.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from checkpointing import columns, keys, parse
from checkpointing.checksum import crc64
from checkpointing.errors import ManifestInvalid, ObjectMissing
from checkpointing.extents import Extent, Extents
from checkpointing.sealed import canonical, fetch, seal, unseal
from checkpointing.skeletons import shorten
from checkpointing.store.base import ObjectStore
from checkpointing.tree import Node

_INDEX: Final = ("everstep-index/3", "everstep-index/2", "everstep-index/1")
_MANIFEST: Final = ("everstep-manifest/3", "everstep-manifest/2", "everstep-manifest/1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What one rank uploaded at one step.

    Attributes:
        run: Name of the run.
        step: Finished steps.
        attempt: Attempt that staged it.
        rank: The rank.
        world: Ranks in that attempt.
        data_key: Object with the extents that this rank owns; "" when it owns none.
        data_nbytes: Size of that object.
        data_crc64: CRC64NVME of that object.
        skeleton: Of the replicated state, from rank 0 only; in short or long form.
        skeleton_crc64: CRC of it as JSON, from every rank.
        local_skeleton: Of this rank's own state.
        extents: All that the rank staged; offset -1 for what others upload.
    """

    run: str
    step: int
    attempt: int
    rank: int
    world: int
    data_key: str
    data_nbytes: int
    data_crc64: int
    skeleton: Node
    skeleton_crc64: int
    local_skeleton: Node
    extents: Sequence[Extent]

    def pack(self) -> bytes:
        """Return the stored form; the same index always gives the same bytes."""
        return seal(_INDEX[0], _fields(self))

    @classmethod
    def unpack(cls, packed: bytes) -> "Index":
        """Read the stored form.

        Raises:
            ManifestInvalid: Not an index, or altered.
        """
        return cls(**parse.index(unseal(packed, *_INDEX)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Where a rank's part of a committed checkpoint is."""

    rank: int
    index_key: str
    index_crc64: int
    data_key: str
    data_nbytes: int
    data_crc64: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed checkpoint.

    Attributes:
        run: Name of the run.
        step: Finished steps.
        attempt: Attempt that staged it.
        world: Ranks in that attempt.
        write_id: Names the writer, so that a lost answer to its put can be settled.
        nbytes: Bytes of all objects that it names.
        shards: One per rank, in order.
        skeleton: Of the replicated state.
        tensors: Of the state, one extent for a replicated tensor and one per piece of a sharded
            one: owner, and offset in the owner's object.
        tokens: Tokens trained until then; None when nobody told.
        average_of: (step, attempt) of the checkpoints whose weights it is the average of. Such a
            one is nothing to resume from.
    """

    run: str
    step: int
    attempt: int
    world: int
    write_id: str
    nbytes: int
    shards: tuple[Shard, ...]
    skeleton: Node
    tensors: Sequence[Extent]
    average_of: tuple[tuple[int, int], ...] = ()
    tokens: int | None = None

    def pack(self) -> bytes:
        """Return the stored form."""
        return seal(_MANIFEST[0], _fields(self))

    @classmethod
    def unpack(cls, packed: bytes) -> "Manifest":
        """Read the stored form.

        Raises:
            ManifestInvalid: Not a manifest, or altered.
        """
        found = parse.manifest(unseal(packed, *_MANIFEST))
        shards = tuple(Shard(**shard) for shard in found.pop("shards"))
        return cls(**found, shards=shards)


def read_manifest(store: ObjectStore, key: str) -> Manifest:
    """Fetch and verify a manifest.

    Raises:
        ManifestInvalid: Altered or torn, or copied here from another step or run.
        StoreError: Not readable.
    """
    try:
        manifest = fetch(store, key, Manifest.unpack)
    except ManifestInvalid as error:
        raise ManifestInvalid(f"{key}: {error}") from error
    own = keys.manifest_key(manifest.run, manifest.step, manifest.attempt)
    if key not in (own, keys.old_manifest_key(manifest.run, manifest.step)):
        raise ManifestInvalid(f"{key}: is a copy of {own}")
    return manifest


def read_commit(store: ObjectStore, run: str, step: int, attempt: int) -> Manifest:
    """Fetch and verify the manifest of an attempt at a step, also one under an old key.

    Raises:
        ManifestInvalid: As `read_manifest`.
        ObjectMissing: It is not committed.
        StoreError: Not readable.
    """
    for key in (keys.manifest_key(run, step, attempt), keys.old_manifest_key(run, step)):
        with suppress(ObjectMissing):
            found = read_manifest(store, key)
            if found.attempt == attempt:
                return found
    raise ObjectMissing(f"{run}: step {step} of attempt {attempt} is not committed")


def read_index(store: ObjectStore, key: str, crc: int) -> Index:
    """Fetch and verify an index against the CRC that its writer reported.

    Raises:
        ManifestInvalid: Altered, or another one than reported.
        StoreError: Not readable.
    """

    def unpack(packed: bytes) -> Index:
        if crc64(packed) != crc:
            raise ManifestInvalid("CRC differs from what its writer reported")
        return Index.unpack(packed)

    try:
        return fetch(store, key, unpack)
    except ManifestInvalid as error:
        raise ManifestInvalid(f"{key}: {error}") from error


def skeleton_crc64(skeleton: Node) -> int:
    """Return the CRC by which ranks compare the Python values of a replicated state."""
    return crc64(canonical(shorten(skeleton)))


def _fields(document: "Index | Manifest") -> dict[str, Any]:
    """Return the JSON form; not by `asdict`, whose deep copies take seconds for many tensors."""
    found = {f.name: getattr(document, f.name) for f in fields(document)}
    for name in ("extents", "tensors"):
        if name in found:
            found[name] = columns.to_json(Extents.of(found[name]))
    for name in ("skeleton", "local_skeleton"):
        if name in found:
            found[name] = shorten(found[name])
    if "shards" in found:
        found["shards"] = [asdict(shard) for shard in found["shards"]]
    if not found.get("average_of", True):
        del found["average_of"]
    if found.get("tokens", 0) is None:
        del found["tokens"]
    return found
