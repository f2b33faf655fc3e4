"""The rank's side of the arena: makes the file, and opens and seals its slots."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from checkpointing.checksum import crc64
from checkpointing.errors import ArenaInvalid, StageBusy, StageError, StageRefused
from checkpointing.leaves import Bytes
from checkpointing.stage.admission import Admission, alone
from checkpointing.stage.arena import (
    PAGE,
    Capacities,
    MappedArena,
    StagedSlot,
    UploadState,
)
from checkpointing.stage.memory import gib
from checkpointing.stage.meta import Meta
from checkpointing.tiers import EVERYWHERE, Tier

__all__ = ["ArenaWriter", "Meta"]

_META_SPARE: Final = 64 << 10  # Python values in a state may get longer
_UNSENT_S: Final = 60.0
_POLL_S: Final = 0.02
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Whose snapshot a slot holds, and where else it is to be kept."""

    step: int
    attempt: int
    rank: int
    world: int
    tiers: Tier = EVERYWHERE


class ArenaWriter:
    """The one writer of an arena file.

    Args:
        path: The file.
        local_world: How many ranks of this node take as much memory, this one among them.
        release: Called before the file is unmapped.
    """

    def __init__(
        self, path: Path, local_world: int = 1, release: Callable[[], None] = lambda: None
    ) -> None:
        self._path = path
        self._release = release
        self._admission = Admission(path, local_world)
        self._arena: MappedArena | None = None
        try:
            self._arena = MappedArena(path, populate=True)
        except (FileNotFoundError, ArenaInvalid):
            path.unlink(missing_ok=True)

    @property
    def arena(self) -> MappedArena | None:
        """The file as it is mapped, None before `ensure` made one."""
        return self._arena

    @property
    def slots(self) -> int:
        """How many snapshots the arena holds: two, or one where memory is scarce."""
        return self._arena.capacities.slots if self._arena else 0

    def ensure(self, meta_nbytes: int, data_nbytes: int) -> None:
        """Make the arena large enough; what a smaller one held lies in the new one as well.

        Raises:
            StageRefused: Not even one slot of this size fits into memory.
        """
        old = self._arena.capacities if self._arena else None
        if old and old.meta >= meta_nbytes and old.data >= data_nbytes:
            return
        meta = _pages(meta_nbytes + meta_nbytes // 4 + _META_SPARE)
        data = _pages(data_nbytes)
        with alone(self._path.parent):
            fresh = self._path.with_name(f".{self._path.name}.new")
            fresh.unlink(
                missing_ok=True
            )  # a killed rank may have left it, and its memory is needed
            capacities = self._admit(meta, data)
            try:
                _take(fresh, capacities)
            except OSError as error:
                fresh.unlink(missing_ok=True)
                raise StageRefused(
                    f"{self._admission.needs(capacities)} ({error.strerror})"
                ) from error
            arena = MappedArena(fresh, populate=True)
            if self._arena is not None:
                _carry_over(self._arena, arena)
            fresh.replace(self._path)
            self.close()
            self._arena = arena

    def has_room(self, *, replace: bool = False) -> bool:
        """Tell whether a save would find a free slot now.

        Args:
            replace: A snapshot that nobody began to upload may be dropped for it.
        """
        return self._arena is None or self._victim(self._arena, replace=replace) is not None

    def open(self, *, replace: bool = False) -> tuple[int, Bytes, StagedSlot | None]:
        """Begin to write a slot: until it is sealed it counts for nothing.

        Returns:
            Its number, its extent area, and the snapshot that was dropped unsent for it.

        Raises:
            StageBusy: Every slot is still needed.
        """
        arena = self._arena
        if arena is None:
            raise StageError("open before ensure")
        index = self._victim(arena, replace=replace)
        if index is None:
            raise StageBusy("the upload of the previous save is not done")
        held = arena.headers[index].staged(index)
        arena.headers[index].record.begin()
        data = np.frombuffer(arena.data(index), dtype=np.uint8)
        return index, data, held if held and held.is_unsent else None

    def seal(self, index: int, label: Label, data_nbytes: int, packed: bytes) -> None:
        """Make an open slot a snapshot; `ensure` had room for as much meta."""
        arena = self._arena
        if arena is None or len(packed) > arena.capacities.meta:
            raise StageError(f"no room for {len(packed)} bytes of meta")
        start = arena.capacities.meta_at(index)
        arena.view[start : start + len(packed)] = packed
        arena.headers[index].record.write(
            label.step,
            label.attempt,
            label.rank,
            label.world,
            time.time(),
            data_nbytes,
            len(packed),
            crc64(packed),
            label.tiers,
        )

    def close(self) -> None:
        """Unmap the file; it stays."""
        if self._arena is not None:
            self._release()
            self._arena.close()
            self._arena = None

    @property
    def memory(self) -> Bytes:
        """The whole file as it is mapped."""
        assert self._arena is not None
        return np.frombuffer(self._arena.view, dtype=np.uint8)

    @staticmethod
    def _victim(arena: MappedArena, *, replace: bool) -> int | None:
        """Return the slot to write: an empty one, or the oldest that is no longer needed.

        Of two complete slots the newest stays, whatever its upload does. It gives way when the
        older one is still to be sent and itself is not for the store; and to `replace`, when the
        upload of the older one runs, which would be torn otherwise. What somebody copies to
        another node or a disk stays; what he did not begin with yet does not.
        """
        staged = arena.staged()
        slots = arena.capacities.slots
        if len(staged) < slots:
            return min(set(range(slots)) - {slot.index for slot in staged})
        oldest = staged[-1]
        passing = [s.index for s in staged[:-1] if not s.is_for_store and not s.held]
        # A failed upload is tried again until there is a newer one to send.
        is_wanted = oldest.is_for_store and oldest.upload_state is UploadState.FAILED
        if not oldest.is_unsent and not oldest.held and not (is_wanted and passing):
            return oldest.index
        if passing:
            return passing[0]
        waiting = [s.index for s in staged if s.upload_state is UploadState.NONE and not s.held]
        return waiting[-1] if replace and waiting else None

    def _admit(self, meta: int, data: int) -> Capacities:
        """Choose how many slots fit, for all ranks of the node, the old arena given up last.

        Raises:
            StageRefused: With the numbers.
        """
        two = Capacities(meta=meta, data=data)
        one = Capacities(meta=meta, data=data, slots=1)
        limit, left = self._admission.left()
        if self._admission.share(two) <= left:
            return two
        if self._arena is not None and (chosen := self._without_the_old(two, one, left)):
            return chosen
        if self._admission.share(one) > left:
            raise StageRefused(
                f"{self._admission.needs(two)}, {gib(self._admission.share(one))} for one copy; "
                f"{limit} has {gib(left)} left"
            )
        _log.warning(
            "%s; %s has %s left: one copy is kept, so that a save waits for the upload before it",
            *(self._admission.needs(two), limit, gib(left)),
        )
        return one

    def _without_the_old(self, two: Capacities, one: Capacities, left: int) -> Capacities | None:
        """Give up the arena that has become too small, once the store has what it holds.

        None when that would not help, or when one copy fits beside what cannot be sent now.
        """
        old = self._arena
        assert old is not None
        freed = left + old.capacities.file_nbytes
        chosen = next((c for c in (two, one) if self._admission.share(c) <= freed), None)
        must = self._admission.share(one) > left
        if chosen is None or (chosen is one and not must):
            return None
        unsent = _wait_until_sent(old)
        if unsent and not must:
            return None
        _give_up(unsent)
        self._path.unlink(missing_ok=True)
        self.close()
        return chosen


def _take(path: Path, capacities: Capacities) -> None:
    """Make the file with all of its memory: a sparse one would fail with SIGBUS in mid-training."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, capacities.file_nbytes)
        file.write(capacities.pack())


def _carry_over(old: MappedArena, new: MappedArena) -> None:
    """Copy the newest snapshots, so that growing costs none that is not in the store yet."""
    _give_up(_wait_until_sent(old, besides=new.capacities.slots))
    for index, staged in reversed(list(enumerate(old.staged()[: new.capacities.slots]))):
        meta_nbytes, meta_crc = old.headers[staged.index].meta()
        if staged.nbytes > new.capacities.data or meta_nbytes > new.capacities.meta:
            continue
        source, target = old.data(staged.index), new.data(index)
        target[: staged.nbytes] = source[: staged.nbytes]
        start, at = old.capacities.meta_at(staged.index), new.capacities.meta_at(index)
        new.view[at : at + meta_nbytes] = old.view[start : start + meta_nbytes]
        header = new.headers[index]
        header.record.write(
            staged.step,
            staged.attempt,
            staged.rank,
            staged.world,
            staged.staged_at,
            staged.nbytes,
            meta_nbytes,
            meta_crc,
            staged.tiers,
        )
        if staged.is_for_store and not staged.is_unsent:
            header.mark(header.record.sequence, staged.upload_state)


def _give_up(steps: list[int]) -> None:
    if steps:
        _log.warning("the state has grown; given up before their upload: steps %s", steps)


def _wait_until_sent(arena: MappedArena, besides: int = 0) -> list[int]:
    """Wait a bounded time for the uploader; return the steps that it did not get to.

    Args:
        arena: What it sends.
        besides: So many of the newest snapshots need not be sent.
    """
    deadline = time.monotonic() + _UNSENT_S
    while unsent := [s.step for s in arena.staged()[besides:] if s.is_unsent]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return unsent


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE
