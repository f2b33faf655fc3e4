"""The arena: one file per rank in shared memory, two slots, readable by anyone at any moment.

    page 0            magic, capacities, number of slots, their CRC
    page 1, page 2    header of slot 0, slot 1: a word of upload state, two words of hold, and a
                      seqlocked record
    then per slot     meta (JSON) and the extents, the large ones at multiples of 4096

Where memory is scarce there is one slot only, and the second header stays empty.

The rank writes everything but these words. The upload word is the uploader's, the hold is of the
process that copies to other nodes and disks. Both carry the sequence number that they speak about,
so a slot that is written again falls back to "none" and "not held" by itself. A hold ends by itself
too, when nobody renews it. A slot whose sequence number is odd was left half-written and counts for
nothing.
"""

import mmap
import os
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from checkpointing.errors import ArenaInvalid
from checkpointing.seqlock import Record
from checkpointing.tiers import EVERYWHERE, Tier

PAGE: Final = 4096
SLOTS: Final = 2
_MAGIC: Final = b"EVSTARN3"
_CAPACITIES: Final = struct.Struct("<QQQ")
_CAPACITIES_CRC: Final = struct.Struct("<I")
_RECORD_AT: Final = 64
# step, attempt, rank, world, staged_at, data bytes, meta bytes, CRC64 of the meta, tiers
_HEADER: Final = "<qqqqdQQQQ"
_STATE_BITS: Final = 8
_SEQUENCE: Final = (1 << 64 - _STATE_BITS) - 1  # as much of it as the upload word takes
_POPULATE: Final = getattr(mmap, "MAP_POPULATE", 0)  # Linux only


class UploadState(StrEnum):
    """How far the uploader is with a slot."""

    NONE = "none"
    UPLOADING = "uploading"
    UPLOADED = "uploaded"
    FAILED = "failed"


_STATES: Final = tuple(UploadState)
_DONE: Final = (UploadState.UPLOADED, UploadState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSlot:
    """A complete snapshot in an arena.

    Attributes:
        step: Number of finished steps it holds.
        attempt: Attempt that staged it.
        rank: Rank that staged it.
        world: Number of ranks in that attempt.
        nbytes: Bytes of its extents, gaps included.
        staged_at: Unix time when it was complete.
        upload_state: How far the uploader is.
        index: Which slot of the arena.
        sequence: Sequence number of this content; another number means other content.
        tiers: Where it is to be kept.
        held: Somebody copies it to another node or a disk.
    """

    step: int
    attempt: int
    rank: int
    world: int
    nbytes: int
    staged_at: float
    upload_state: UploadState = UploadState.NONE
    index: int = 0
    sequence: int = 0
    tiers: Tier = EVERYWHERE
    held: bool = False

    @property
    def is_for_store(self) -> bool:
        """Whether the uploader sends it."""
        return Tier.STORE in self.tiers

    @property
    def is_unsent(self) -> bool:
        """Whether the uploader has still to send it."""
        return self.is_for_store and self.upload_state not in _DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Bytes that each slot has room for, both multiples of a page, and how many slots there are."""

    meta: int
    data: int
    slots: int = SLOTS

    @property
    def file_nbytes(self) -> int:
        """Size of the whole file."""
        return self.meta_at(self.slots)

    def meta_at(self, index: int) -> int:
        """Where a slot's meta begins."""
        return PAGE * (1 + SLOTS) + index * (self.meta + self.data)

    def data_at(self, index: int) -> int:
        """Where a slot's extents begin."""
        return self.meta_at(index) + self.meta

    def pack(self) -> bytes:
        """Return page 0."""
        body = _CAPACITIES.pack(self.meta, self.data, self.slots)
        crc = _CAPACITIES_CRC.pack(zlib.crc32(body))
        return (_MAGIC + body + crc).ljust(PAGE, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> "Capacities":
        """Read page 0.

        Raises:
            ArenaInvalid: Not an arena of this version, or torn.
        """
        body_end = len(_MAGIC) + _CAPACITIES.size
        body = page[len(_MAGIC) : body_end]
        crc = page[body_end : body_end + _CAPACITIES_CRC.size]
        if page[: len(_MAGIC)] != _MAGIC or crc != _CAPACITIES_CRC.pack(zlib.crc32(body)):
            raise ArenaInvalid("not an arena of this version")
        meta, data, slots = _CAPACITIES.unpack(body)
        if not 1 <= slots <= SLOTS:
            raise ArenaInvalid(f"an arena of {slots} slots")
        return cls(meta=meta, data=data, slots=slots)


class Header:
    """One slot's header page, over a mapping or over a copy."""

    def __init__(self, page: memoryview) -> None:
        self._words = page[: 3 * 8].cast("Q")  # upload state; what is held, until when
        self.record = Record(page[_RECORD_AT:], _HEADER)

    def staged(self, index: int) -> StagedSlot | None:
        """Describe the slot; None when it is empty or half-written."""
        sequence = self.record.sequence
        values = self.record.read()
        if values is None or sequence & 1 or self.record.sequence != sequence:
            return None
        step, attempt, rank, world, staged_at, nbytes, _, _, tiers = values
        return StagedSlot(
            step=int(step),
            attempt=int(attempt),
            rank=int(rank),
            world=int(world),
            nbytes=int(nbytes),
            staged_at=staged_at,
            upload_state=self.upload_state(sequence),
            index=index,
            sequence=sequence,
            tiers=Tier(int(tiers)),
            held=self.is_held(sequence),
        )

    def meta(self) -> tuple[int, int]:
        """Return length and CRC64 of the meta."""
        values = self.record.read()
        if values is None:
            raise ArenaInvalid("the slot is empty or half-written")
        return int(values[6]), int(values[7])

    def upload_state(self, sequence: int) -> UploadState:
        """Return the state that the uploader gave to this content."""
        word = self._words[0]
        number = word & ((1 << _STATE_BITS) - 1)
        if word >> _STATE_BITS != sequence & _SEQUENCE or number >= len(
            _STATES
        ):  # older, or altered
            return UploadState.NONE
        return _STATES[number]

    def mark(self, sequence: int, state: UploadState) -> None:
        """Set the upload state of this content (the uploader only)."""
        self._words[0] = (sequence & _SEQUENCE) << _STATE_BITS | _STATES.index(state)

    def hold(self, sequence: int, for_s: float) -> None:
        """Keep this content from being written over for a while (the copying process only).

        Who holds it looks afterwards whether the slot still has this content. Once it has not, what
        was held of it neither takes the place of what is held of the next, nor ends that.
        """
        if self._words[1] != sequence and (for_s <= 0 or self.record.sequence != sequence):
            return
        self._words[2] = int((time.monotonic() + for_s) * 1000)  # one clock for all of a machine
        self._words[1] = sequence if for_s > 0 else 0

    def is_held(self, sequence: int) -> bool:
        """Tell whether this content is being copied to another node or a disk."""
        return self._words[1] == sequence and time.monotonic() * 1000 < self._words[2]

    def release(self) -> None:
        """Let go of the buffer."""
        self._words.release()
        self.record.release()


class MappedArena:
    """An arena file mapped into memory."""

    def __init__(self, path: Path, *, populate: bool = False) -> None:
        """Map the file.

        Args:
            path: The file.
            populate: Enter all of its pages at once, so that no copy meets one for the first time.

        Raises:
            ArenaInvalid: Not an arena, or shorter than it says.
            FileNotFoundError: No such file.
        """
        with path.open("r+b") as file:
            self.capacities = Capacities.unpack(file.read(PAGE))
            if os.fstat(file.fileno()).st_size < self.capacities.file_nbytes:
                raise ArenaInvalid(f"{path}: shorter than its header says")
            flags = mmap.MAP_SHARED | (_POPULATE if populate else 0)
            self.map = mmap.mmap(file.fileno(), self.capacities.file_nbytes, flags=flags)
        self.view = memoryview(self.map)
        self.headers = tuple(
            Header(self.view[PAGE * (1 + index) : PAGE * (2 + index)])
            for index in range(self.capacities.slots)
        )

    def staged(self) -> tuple[StagedSlot, ...]:
        """Return the complete slots, newest first."""
        return _complete(self.headers)

    def data(self, index: int) -> memoryview:
        """Return a slot's extent area."""
        start = self.capacities.data_at(index)
        return self.view[start : start + self.capacities.data]

    def close(self) -> None:
        """Unmap; when somebody still holds a view of the data, when that is gone."""
        for header in self.headers:
            header.release()
        self.view.release()
        with suppress(BufferError):
            self.map.close()


def peek(path: Path) -> tuple[StagedSlot, ...]:
    """Return the complete slots of an arena, newest first, from three pages read.

    An absent or foreign file has none.
    """
    try:
        with path.open("rb") as file:
            pages = file.read(PAGE * (1 + SLOTS))
        slots = Capacities.unpack(pages[:PAGE]).slots
    except (FileNotFoundError, IsADirectoryError, ArenaInvalid):
        return ()
    if len(pages) < PAGE * (1 + SLOTS):
        return ()
    view = memoryview(pages)
    return _complete([Header(view[PAGE * (1 + i) : PAGE * (2 + i)]) for i in range(slots)])


def _complete(headers: "tuple[Header, ...] | list[Header]") -> tuple[StagedSlot, ...]:
    found = [header.staged(index) for index, header in enumerate(headers)]
    whole = [staged for staged in found if staged is not None]
    return tuple(sorted(whole, key=lambda staged: (staged.attempt, staged.step), reverse=True))
