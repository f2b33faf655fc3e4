"""Watches the arenas of a node and sends what is complete, once, and reports it."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from checkpointing.errors import ArenaInvalid, CheckpointingError, ObjectConflict, StageError
from checkpointing.stage.arena import MappedArena, StagedSlot, UploadState, peek
from checkpointing.store.base import ObjectStore
from checkpointing.uploader.ages import Ages
from checkpointing.uploader.send import send

_ARENAS_AT_ONCE: Final = 4
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
_log = logging.getLogger(__name__)

Emit = Callable[[Mapping[str, Any]], bool]
"""Reports an event; False when nobody listens any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """A slot that could not be sent, and when to try again."""

    staged: StagedSlot
    tries: int
    again_at: float


class Watcher:
    """One poll after the other; the uploads themselves run in threads.

    Args:
        folder: Holds the files `arena-*`.
        store: Where to send.
        run: Name of the run.
        emit: Takes the events.
    """

    def __init__(self, folder: Path, store: ObjectStore, run: str, emit: Emit) -> None:
        self._folder = folder
        self._store = store
        self._run = run
        self._emit = emit
        self._pool = ThreadPoolExecutor(_ARENAS_AT_ONCE, thread_name_prefix="upload")
        self._running: dict[Path, Future[None]] = {}
        self._failures: dict[Path, _Failure] = {}
        self._given_up: dict[Path, StagedSlot] = {}
        self._ages = Ages()
        self.heard = True

    @property
    def busy(self) -> bool:
        """Tell whether an upload is in flight."""
        return any(not future.done() for future in self._running.values())

    def poll(self) -> None:
        """Start what is to be sent: one slot per arena at a time, the oldest first."""
        if not self.heard:
            return
        paths = sorted(self._folder.glob("arena-*"))
        idle = [path for path in paths if self._is_idle(path)]  # before a look: else it is stale
        found = {path: peek(path) for path in paths}
        self._ages.look(found)
        for path in idle:
            staged = self._next(path, found[path])
            if staged is not None:
                self._running[path] = self._pool.submit(self._send, path, staged)

    def _is_idle(self, path: Path) -> bool:
        """Tell whether nothing is being sent from an arena; an upload that is over is let go."""
        future = self._running.get(path)
        if future is None or not future.done():
            return future is None
        del self._running[path]
        future.result()
        return True

    def _next(self, path: Path, found: Sequence[StagedSlot]) -> StagedSlot | None:
        slots = [staged for staged in found if staged.is_for_store]
        failure = self._failures.get(path)
        if failure is not None and not (slots and _same(slots[0], failure.staged)):
            del self._failures[path]
            self._report_failure(failure.staged, "a later save took its place", final=True)
            failure = None
        for staged in reversed(slots):
            waits = failure is not None and _same(failure.staged, staged)
            # "uploading" and not by us: an uploader was killed.
            if staged.upload_state in (UploadState.NONE, UploadState.UPLOADING) and not waits:
                return staged
        if failure is not None:
            return failure.staged if time.monotonic() >= failure.again_at else None
        if slots and slots[0].upload_state is UploadState.FAILED:
            # Failed with an uploader before this one, unless this one gave it up for good.
            given_up = self._given_up.get(path)
            return None if given_up and _same(given_up, slots[0]) else slots[0]
        return None

    def _send(self, path: Path, staged: StagedSlot) -> None:
        try:
            arena = MappedArena(path)
        except (FileNotFoundError, ArenaInvalid):
            return  # replaced; the next poll sees what is there
        except OSError as error:  # no memory or no descriptor for the mapping
            self._failed(path, staged, error)
            return
        header = arena.headers[staged.index]
        try:
            # A state that has grown gets a new file, where sequence numbers begin again.
            current = header.staged(staged.index)
            if current is None or not _same(current, staged):
                return
            header.mark(staged.sequence, UploadState.UPLOADING)
            sent = send(self._store, self._run, arena, staged)
            told = self._report(
                staged,
                event="uploaded",
                index_key=sent.index_key,
                index_crc64=sent.index_crc64,
                nbytes=sent.nbytes,
                upload_s=self._ages.of(path, staged),
                staged_at=staged.staged_at,
                sent_nbytes=sent.transfer.nbytes,
                sent_s=sent.transfer.seconds,
                gb_per_s=sent.transfer.gb_per_s,
                retries=dict(sent.transfer.retries),
                hedges=sent.transfer.hedges,
                plane=sent.transfer.plane,
            )
            # Untold means unfinished: the next uploader finds the objects there and tells.
            if told:
                header.mark(staged.sequence, UploadState.UPLOADED)
            if (failure := self._failures.get(path)) and _same(failure.staged, staged):
                del self._failures[path]
        except (CheckpointingError, OSError) as error:
            self._failed(path, staged, error)
            header.mark(staged.sequence, UploadState.FAILED)
        finally:
            arena.close()

    def _failed(self, path: Path, staged: StagedSlot, error: CheckpointingError | OSError) -> None:
        final = isinstance(error, ObjectConflict | StageError)
        before = self._failures.pop(path, None)
        tries = before.tries + 1 if before and _same(before.staged, staged) else 1
        if final:
            self._given_up[path] = staged
        else:
            longest = min(_FIRST_WAIT_S * 2 ** (tries - 1), _LONGEST_WAIT_S)
            wait = longest * (0.5 + secrets.randbelow(1000) / 2000)
            again_at = time.monotonic() + wait
            self._failures[path] = _Failure(staged=staged, tries=tries, again_at=again_at)
        self._report_failure(staged, str(error), final=final)

    def _report_failure(self, staged: StagedSlot, error: str, *, final: bool) -> None:
        line = " ".join(error.split())
        _log.warning("rank %d step %d not uploaded: %s", staged.rank, staged.step, line)
        self._report(staged, event="upload_failed", error=line, final=final)

    def _report(self, staged: StagedSlot, *, event: str, **fields: object) -> bool:
        ids = {
            "event": event,
            "rank": staged.rank,
            "attempt": staged.attempt,
            "step": staged.step,
            "world": staged.world,
        }
        heard = self._emit({**ids, **fields})
        self.heard = self.heard and heard
        return heard


def _same(one: StagedSlot, other: StagedSlot) -> bool:
    """Tell whether both describe the same content, however far its copies are."""
    return replace(one, upload_state=other.upload_state, held=other.held) == other
