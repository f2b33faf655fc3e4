"""Takes one staged slot to the store."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from checkpointing import keys
from checkpointing.checksum import combine, crc64
from checkpointing.errors import ObjectConflict, StageError
from checkpointing.manifest import Index, skeleton_crc64
from checkpointing.plan import Extent
from checkpointing.stage.arena import MappedArena, StagedSlot
from checkpointing.stage.writer import Meta
from checkpointing.store.base import ObjectStore
from checkpointing.store.transfer import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A slot that is in the store: its index, the bytes of its extents, and how they got there."""

    index_key: str
    index_crc64: int
    nbytes: int
    transfer: Transfer


def send(store: ObjectStore, run: str, arena: MappedArena, staged: StagedSlot) -> Sent:
    """Upload the extents that this rank owns, then its index. Doing it again changes nothing.

    Raises:
        StageError: The slot was written again meanwhile.
        ObjectConflict: The keys hold another content.
        StoreError: The store could not take it.
    """
    meta = Meta.read(arena, staged.index)
    if arena.headers[staged.index].record.sequence != staged.sequence:
        raise StageError("the slot was written again")
    owned = sorted((e for e in meta.extents if e.owner == staged.rank), key=_offset)
    nbytes = sum(extent.nbytes for extent in owned)
    crc = combine((extent.crc64, extent.nbytes) for extent in owned)
    data_key = keys.data_key(run, staged.step, staged.attempt, staged.rank) if nbytes else ""
    transfer = Transfer(nbytes=0, seconds=0.0)
    if data_key:
        data = arena.data(staged.index)
        # The recorded CRC goes along: bytes that the rank changed meanwhile are refused.
        pieces = [data[e.offset : e.offset + e.nbytes] for e in owned]
        transfer = store.upload(data_key, pieces, crc)
    index = Index(
        run=run,
        step=staged.step,
        attempt=staged.attempt,
        rank=staged.rank,
        world=staged.world,
        data_key=data_key,
        data_nbytes=nbytes,
        data_crc64=crc,
        skeleton=meta.skeleton if staged.rank == 0 else None,
        skeleton_crc64=skeleton_crc64(meta.skeleton),
        local_skeleton=meta.local_skeleton,
        extents=_in_object(meta.extents, owned),
    )
    packed = index.pack()
    index_key = keys.index_key(run, staged.step, staged.attempt, staged.rank)
    if not store.put_if_absent(index_key, packed) and store.get(index_key) != packed:
        raise ObjectConflict(f"{index_key}: has other content")
    return Sent(index_key=index_key, index_crc64=crc64(packed), nbytes=nbytes, transfer=transfer)


def _in_object(extents: Sequence[Extent], owned: Sequence[Extent]) -> tuple[Extent, ...]:
    """Return the extents with their offsets in the uploaded object, -1 for what others upload."""
    offsets: dict[tuple[str, str], int] = {}
    end = 0
    for extent in owned:
        offsets[extent.kind, extent.name] = end
        end += extent.nbytes
    return tuple(
        replace(extent, offset=offsets.get((extent.kind, extent.name), -1)) for extent in extents
    )


def _offset(extent: Extent) -> int:
    return extent.offset
