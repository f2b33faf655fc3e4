"""A rank's slot: one small memory-mapped file, the step boundary as seen from outside.

The rank writes its heartbeat, the agent writes the control part; both are seqlocked records, so
either side may die at any instruction without ever showing half a record to the other.
"""

import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from checkpointing.errors import SlotInvalid
from checkpointing.seqlock import Record

_MAGIC: Final = b"EVSTSLT4"
_SIZE: Final = 4096
_BEAT_AT: Final = 64
_CONTROL_AT: Final = 2048
# pid step phase since allowed loss step_s stall_s stage_s, eight counters, guarded
_BEAT: Final = "<qqqddddddqqqqqqqqq"
_CONTROL: Final = "<qqqqq"


class Phase(StrEnum):
    """What a rank is doing."""

    INIT = "init"
    RESTORE = "restore"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    EVAL = "eval"
    FINISH = "finish"


_PHASES: Final = tuple(Phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReading:
    """A rank's heartbeat.

    Attributes:
        pid: Process id of the rank.
        step: Last finished step, -1 when none.
        phase: What it is doing now.
        phase_since: `time.monotonic()` at the last sign of life in this phase.
        allowed_s: How long the phase may last from `phase_since`; inf means no bound.
        loss: NaN when not measured.
        step_s: Moving average of the seconds a step takes; NaN before the first.
        stall_s: Seconds that the last save blocked the rank; NaN before the first.
        stage_s: Seconds until its copy was complete; NaN while it is not.
        saved_step: Step of the last save; -1 before the first, and when it did not stay.
        saved_tokens: Tokens trained until then, 0 when not told.
        staged_nbytes: Bytes that the last complete copy took.
        beats: Number of heartbeats written.
        saves: Saves staged.
        skipped_saves: Saves left out because no slot was free.
        dropped_saves: Saves that did not stay: a later one took the place of one that waited for
            its upload, or the state changed while it was copied.
        tokens: Tokens trained so far, 0 when not told.
        guarded: SIGTERM ends it only when announced (`Control.terminate`), and not while its main
            thread waits inside a library: end it with SIGKILL.
    """

    pid: int
    step: int = -1
    phase: Phase = Phase.INIT
    phase_since: float = 0.0
    allowed_s: float = float("inf")
    loss: float = float("nan")
    step_s: float = float("nan")
    stall_s: float = float("nan")
    stage_s: float = float("nan")
    saved_step: int = -1
    saved_tokens: int = 0
    staged_nbytes: int = 0
    beats: int = 0
    saves: int = 0
    skipped_saves: int = 0
    dropped_saves: int = 0
    tokens: int = 0
    guarded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What the agent asks of the rank.

    Attributes:
        interval_steps: Save for the store so often (see `tiers.due`); 0 means never.
        effective_step: First step at which `interval_steps` holds, so that all ranks change at one.
        snapshot_step: Save after this step as well; -1 for none.
        stop_step: Save after this step and leave the loop; -1 for none.
        terminate: The next SIGTERM is the agent's: end at once.
    """

    interval_steps: int
    effective_step: int = 0
    snapshot_step: int = -1
    stop_step: int = -1
    terminate: bool = False


def create(path: Path) -> None:
    """Put an empty slot at `path`, replacing what was there; readers see the old or the new."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(_MAGIC.ljust(_SIZE, b"\0"))
    Path(temporary).replace(path)


class _Mapped:
    """The open file and its two records."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _SIZE)
        except ValueError as error:
            raise SlotInvalid(f"{path}: shorter than a slot") from error
        if self._map[: len(_MAGIC)] != _MAGIC:
            self._map.close()
            raise SlotInvalid(f"{path}: not a slot of this version")
        view = memoryview(self._map)
        self._beat = Record(view[_BEAT_AT:], _BEAT)
        self._control = Record(view[_CONTROL_AT:], _CONTROL)
        self._release: tuple[Callable[[], None], ...] = (
            self._beat.release,
            self._control.release,
            view.release,
        )

    def control(self) -> Control | None:
        """Return what the agent last asked; None when nothing yet, or torn."""
        values = self._control.read()
        if values is None:
            return None
        interval, effective, snapshot, stop, terminate = (int(value) for value in values)
        return Control(
            interval_steps=interval,
            effective_step=effective,
            snapshot_step=snapshot,
            stop_step=stop,
            terminate=bool(terminate),
        )

    def close(self) -> None:
        """Unmap the file."""
        for release in self._release:
            release()
        self._map.close()


class RankSlot(_Mapped):
    """The rank's side: writes heartbeats, reads control."""

    def publish(self, reading: SlotReading) -> None:
        """Write one heartbeat."""
        self._beat.write(
            reading.pid,
            reading.step,
            _PHASES.index(reading.phase),
            reading.phase_since,
            reading.allowed_s,
            reading.loss,
            reading.step_s,
            reading.stall_s,
            reading.stage_s,
            reading.saved_step,
            reading.saved_tokens,
            reading.staged_nbytes,
            reading.beats,
            reading.saves,
            reading.skipped_saves,
            reading.dropped_saves,
            reading.tokens,
            int(reading.guarded),
        )


class SlotView(_Mapped):
    """The agent's side: reads heartbeats, writes control."""

    def read(self) -> SlotReading | None:
        """Return the last heartbeat; None when nothing was written yet, or torn after retries."""
        values = self._beat.read()
        if values is None:
            return None
        pid, step, phase, since, allowed, loss, step_s, stall_s, stage_s, *rest = values
        saved_step, saved_tokens, staged, *counters = (int(value) for value in rest)
        beats, saves, skipped, dropped, tokens, guarded = counters
        return SlotReading(
            pid=int(pid),
            step=int(step),
            phase=_PHASES[int(phase)],
            phase_since=float(since),
            allowed_s=float(allowed),
            loss=float(loss),
            step_s=float(step_s),
            stall_s=float(stall_s),
            stage_s=float(stage_s),
            saved_step=saved_step,
            saved_tokens=saved_tokens,
            staged_nbytes=staged,
            beats=beats,
            saves=saves,
            skipped_saves=skipped,
            dropped_saves=dropped,
            tokens=tokens,
            guarded=bool(guarded),
        )

    def set_control(self, control: Control) -> None:
        """Publish what the rank shall do; it looks at every step boundary."""
        self._control.write(
            control.interval_steps,
            control.effective_step,
            control.snapshot_step,
            control.stop_step,
            int(control.terminate),
        )
