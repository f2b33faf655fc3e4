"""The rank's side of the arena: make it, and copy a state into a free slot."""

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from checkpointing import leaves as leaf_bytes
from checkpointing.checksum import crc64
from checkpointing.errors import ArenaInvalid, StageBusy, StageError, StageRefused
from checkpointing.plan import Extent, Plan
from checkpointing.stage.arena import PAGE, SLOTS, Capacities, MappedArena, UploadState
from checkpointing.stage.memory import gib, room_for
from checkpointing.tree import Flat, Node

_META_SPARE: Final = 64 << 10  # Python values in a state may get longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What describes the extents of a slot.

    Attributes:
        skeleton: Of the replicated state.
        local_skeleton: Of this rank's own.
        extents: With offsets in the slot's extent area, and CRCs.
    """

    skeleton: Node
    local_skeleton: Node
    extents: tuple[Extent, ...]

    def pack(self) -> bytes:
        """Return the bytes that lie in the slot."""
        fields = {
            "skeleton": self.skeleton,
            "local_skeleton": self.local_skeleton,
            "extents": [extent.to_json() for extent in self.extents],
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def read(cls, arena: MappedArena, index: int) -> "Meta":
        """Read a slot's meta.

        Raises:
            ArenaInvalid: It fails its CRC.
        """
        nbytes, crc = arena.headers[index].meta()
        start = arena.capacities.meta_at(index)
        packed = bytes(arena.view[start : start + nbytes])
        if crc64(packed) != crc:
            raise ArenaInvalid("the meta of a slot fails its CRC")
        fields = json.loads(packed)
        return cls(
            skeleton=fields["skeleton"],
            local_skeleton=fields["local_skeleton"],
            extents=tuple(Extent.from_json(extent) for extent in fields["extents"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state to be staged, not copied yet."""

    step: int
    attempt: int
    rank: int
    world: int
    replica: Flat
    local: Flat
    plan: Plan

    def leaf(self, extent: Extent) -> Any:
        """Return the tensor or array of an extent."""
        flat = self.local if extent.kind == "local" else self.replica
        return flat.leaves[extent.name]

    def meta(self, sums: list[tuple[int, tuple[int, ...]]]) -> bytes:
        """Return the slot's meta for these CRCs, of each extent and of its blocks."""
        pairs = zip(self.plan.extents, sums, strict=True)
        return Meta(
            skeleton=self.replica.skeleton,
            local_skeleton=self.local.skeleton,
            extents=tuple(replace(e, crc64=crc, blocks=blocks) for e, (crc, blocks) in pairs),
        ).pack()


class ArenaWriter:
    """The one writer of an arena file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arena: MappedArena | None = None
        try:
            self._arena = MappedArena(path)
        except (FileNotFoundError, ArenaInvalid):
            path.unlink(missing_ok=True)

    def ensure(self, snapshot: Snapshot) -> None:
        """Make the arena large enough; what a too small one holds is given up.

        Raises:
            StageRefused: Two slots of this state do not fit into memory.
        """
        # The largest CRC has 20 digits; the plan's own are one digit each.
        empty = [(0, (0,) * _blocks(extent)) for extent in snapshot.plan.extents]
        numbers = sum(1 + len(blocks) for _, blocks in empty)
        needed_meta = len(snapshot.meta(empty)) + 20 * numbers
        needed_data = snapshot.plan.data_nbytes
        if self._arena is not None:
            capacities = self._arena.capacities
            if capacities.meta >= needed_meta and capacities.data >= needed_data:
                return
        self._create(
            Capacities(
                meta=_pages(needed_meta + needed_meta // 4 + _META_SPARE),
                data=_pages(needed_data),
            )
        )

    def has_room(self) -> bool:
        """Tell whether a save would find a free slot now."""
        return self._arena is None or self._free_slot(self._arena) is not None

    def stage(self, snapshot: Snapshot) -> int:
        """Copy a state into the free slot and return its bytes.

        Raises:
            StageBusy: Both slots are still needed.
            StageError: The Python values have outgrown the room for them.
        """
        arena = self._arena
        if arena is None:
            raise StageError("stage before ensure")
        index = self._free_slot(arena)
        if index is None:
            raise StageBusy("the upload of the previous save is not done")
        record = arena.headers[index].record
        record.begin()
        data = np.frombuffer(arena.data(index), dtype=np.uint8)
        packed = snapshot.meta([_copy(snapshot, e, data) for e in snapshot.plan.extents])
        if len(packed) > arena.capacities.meta:
            raise StageError(f"{len(packed)} bytes of Python values; room for them is gone")
        start = arena.capacities.meta_at(index)
        arena.view[start : start + len(packed)] = packed
        record.write(
            snapshot.step,
            snapshot.attempt,
            snapshot.rank,
            snapshot.world,
            time.time(),
            snapshot.plan.data_nbytes,
            len(packed),
            crc64(packed),
        )
        return snapshot.plan.data_nbytes

    def close(self) -> None:
        """Unmap the file; it stays."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    @staticmethod
    def _free_slot(arena: MappedArena) -> int | None:
        """Return the slot to write: never the newest complete one, never one still needed."""
        staged = arena.staged()
        if len(staged) < SLOTS:
            return min(set(range(SLOTS)) - {slot.index for slot in staged})
        oldest = staged[-1]
        done = oldest.upload_state in (UploadState.UPLOADED, UploadState.FAILED)
        return oldest.index if done else None

    def _create(self, capacities: Capacities) -> None:
        """Make a new file under another name, and give it this name when it is whole."""
        self.close()
        fresh = self._path.with_name(f".{self._path.name}.new")
        for old in (self._path, fresh):  # a killed rank may have left the second
            old.unlink(missing_ok=True)  # its memory is needed
        needed = capacities.file_nbytes
        room = room_for(self._path.parent)
        limit = min(room, key=lambda name: room[name])
        refusal = (
            f"staging needs {gib(needed)} in {self._path.parent} for two copies of this rank's "
            f"state; {limit} has {gib(room[limit])} left"
        )
        if room[limit] < needed:
            raise StageRefused(refusal)
        try:
            with fresh.open("xb") as file:
                # Takes the memory now: a sparse file would fail with SIGBUS in mid-training.
                os.posix_fallocate(file.fileno(), 0, needed)
                file.write(capacities.pack())
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise StageRefused(f"{refusal} ({error.strerror})") from error
        fresh.replace(self._path)
        self._arena = MappedArena(self._path)


def _copy(
    snapshot: Snapshot, extent: Extent, data: leaf_bytes.Bytes
) -> tuple[int, tuple[int, ...]]:
    leaf, out = snapshot.leaf(extent), data[extent.offset : extent.offset + extent.nbytes]
    if extent.kind == "shard":
        return leaf_bytes.copy_out_in_blocks(leaf, out)
    return leaf_bytes.copy_out(leaf, out), ()


def _blocks(extent: Extent) -> int:
    """Return how many block CRCs an extent has at most."""
    is_large = extent.kind == "shard" and extent.nbytes > leaf_bytes.BLOCK
    return -(-extent.nbytes // leaf_bytes.BLOCK) if is_large else 0


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE
