"""Takes one staged slot to the store."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from checkpointing import keys
from checkpointing.checksum import combine, crc64
from checkpointing.errors import ObjectConflict, StageError
from checkpointing.extents import Extents
from checkpointing.manifest import Index, skeleton_crc64
from checkpointing.sealed import is_same
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
    owned = _owned(meta.extents, staged.rank)
    sizes = meta.extents.nbytes[owned]
    nbytes = int(sizes.sum())
    crc = combine(zip(meta.extents.crc64[owned].tolist(), sizes.tolist(), strict=True))
    data_key = keys.data_key(run, staged.step, staged.attempt, staged.rank) if nbytes else ""
    transfer = Transfer(nbytes=0, seconds=0.0)
    if data_key:
        data = arena.data(staged.index)
        # The recorded CRC goes along: bytes that the rank changed meanwhile are refused.
        pieces = [data[start:end] for start, end in _rows(meta.extents.offset[owned], sizes)]
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
        skeleton=meta.short if staged.rank == 0 else None,
        skeleton_crc64=skeleton_crc64(meta.short),
        local_skeleton=meta.local_short,
        extents=_in_object(meta.extents, owned),
    )
    packed = index.pack()
    index_key = keys.index_key(run, staged.step, staged.attempt, staged.rank)
    if not store.put_if_absent(index_key, packed):
        packed, wanted = store.get(index_key), packed
        if packed != wanted and not is_same(packed, wanted):
            raise ObjectConflict(f"{index_key}: has other content")
    return Sent(index_key=index_key, index_crc64=crc64(packed), nbytes=nbytes, transfer=transfer)


def _owned(extents: Extents, rank: int) -> NDArray[np.intp]:
    """Return the numbers of what a rank uploads, in the order in which it lies in the slot."""
    found = np.flatnonzero(extents.owner == rank)
    return found[np.argsort(extents.offset[found], kind="stable")]


def _rows(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of bytes that lie in a row, many extents in one where they do."""
    starts, sizes = starts[sizes > 0], sizes[sizes > 0]
    ends = starts + sizes
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    firsts, lasts = np.append(0, breaks), np.append(breaks, len(starts)) - 1
    return zip(starts[firsts].tolist(), ends[lasts].tolist(), strict=True)


def _in_object(extents: Extents, owned: NDArray[np.intp]) -> Extents:
    """Return the extents with their offsets in the uploaded object, -1 for what others upload."""
    sizes = extents.nbytes[owned]
    offsets = np.full(len(extents), -1, np.int64)
    offsets[owned] = np.cumsum(sizes) - sizes
    return extents.with_columns(offset=offsets)
