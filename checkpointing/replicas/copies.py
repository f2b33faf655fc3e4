"""Watches the arenas of a node and has what is due for a tier copied there, once, newest first."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from checkpointing.errors import CheckpointingError, ReplicaError
from checkpointing.replicas.replica import Name
from checkpointing.replicas.shelf import label
from checkpointing.replicas.snapshot import SnapshotFile
from checkpointing.stage.arena import Header, StagedSlot, UploadState, peek
from checkpointing.tiers import Tier

HOLD_S: Final = 5.0
_RENEW_S: Final = 1.0
_AT_ONCE: Final = 4
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_log = logging.getLogger(__name__)

Emit = Callable[[Mapping[str, Any]], bool]
"""Reports an event; False when nobody listens any more."""

CopySlot = Callable[[SnapshotFile, StagedSlot], int]
"""Copies a slot and returns the bytes, 0 when it is there already. ReplicaError or OSError."""


class Holds:
    """Keeps slots from being written over while they are copied, as long as `renew` is called.

    The word in a slot's header ends by itself: a rank waits for no process that died or hangs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[_Held] = []
        self._renewed_at = 0.0

    @contextmanager
    def on(self, path: Path, header: Header, staged: StagedSlot) -> Iterator[None]:
        """Hold a slot; several may hold the same one."""
        held = _Held((path, staged.index, staged.sequence), header)
        with self._lock:
            self._held.append(held)
            header.hold(staged.sequence, HOLD_S)
        try:
            yield
        finally:
            with self._lock:
                self._held.remove(held)
                if all(other.slot != held.slot for other in self._held):
                    header.hold(staged.sequence, 0)

    def renew(self) -> None:
        """Go on holding what is held; call it often."""
        now = time.monotonic()
        if now - self._renewed_at < _RENEW_S:
            return
        self._renewed_at = now
        with self._lock:
            for held in self._held:
                held.header.hold(held.slot[2], HOLD_S)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A slot (arena, number, sequence number) that one job holds, by its own mapping."""

    slot: tuple[Path, int, int]
    header: Header


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """How often a slot could not be copied, and when to try again."""

    tries: int
    again_at: float


class Copies:
    """The copies to one tier: one at a time of each arena, several arenas at once.

    Args:
        folder: Holds the files `arena-*`.
        tier: Which slots are due.
        copy: Copies one.
        holds: Shared by all tiers.
        emit: Takes the events.
    """

    def __init__(self, folder: Path, tier: Tier, copy: CopySlot, holds: Holds, emit: Emit) -> None:
        self._folder = folder
        self._tier = tier
        self._copy = copy
        self._holds = holds
        self._emit = emit
        self._name = tier.name.lower() if tier.name else ""
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix=self._name)
        self._running: dict[Path, Future[None]] = {}
        self._lock = threading.Lock()
        self._done: dict[Path, set[StagedSlot]] = {}
        self._failures: dict[Path, dict[StagedSlot, _Failure]] = {}
        self._era = 0

    @property
    def busy(self) -> bool:
        """Tell whether a copy is in flight."""
        return any(not running.done() for running in self._running.values())

    def forget(self) -> None:
        """Copy everything again: it goes to somewhere else from now on."""
        with self._lock:
            self._era += 1
            self._done.clear()
            self._failures.clear()

    def poll(self) -> None:
        """Start what is to be copied."""
        for path in sorted(self._folder.glob("arena-*")):
            running = self._running.get(path)
            if running is not None and not running.done():
                continue
            if running is not None:
                self._running.pop(path).result()
            if (staged := self._next(path)) is not None:
                self._running[path] = self._pool.submit(self._job, path, staged, self._era)

    def _next(self, path: Path) -> StagedSlot | None:
        slots = [_content(staged) for staged in peek(path) if self._tier in staged.tiers]
        now = time.monotonic()
        with self._lock:
            done = self._done.setdefault(path, set())
            failures = self._failures.setdefault(path, {})
            done.intersection_update(slots)
            for gone in failures.keys() - set(slots):
                del failures[gone]
            for staged in slots:
                failure = failures.get(staged)
                if staged not in done and (failure is None or now >= failure.again_at):
                    return staged
        return None

    def _job(self, path: Path, staged: StagedSlot, era: int) -> None:
        ids = {"tier": self._name, **name_of(staged).to_json()}
        begun = time.monotonic()
        try:
            nbytes = self._copy_held(path, staged)
        except (CheckpointingError, OSError) as error:
            line = " ".join(str(error).split())[:500] or type(error).__name__
            self._failed(path, staged, era)
            _log.warning("%s not copied to %s: %s", label(name_of(staged)), self._name, line)
            self._emit({"event": "copy_failed", **ids, "error": line})
            return
        if nbytes is None:
            return
        self._succeeded(path, staged, era)
        if nbytes:
            seconds = max(time.monotonic() - begun, 1e-9)
            report = {"nbytes": nbytes, "seconds": seconds, "gb_per_s": nbytes / seconds / 1e9}
            self._emit({"event": "copied", **ids, **report})

    def _copy_held(self, path: Path, staged: StagedSlot) -> int | None:
        """Copy a slot, held meanwhile; None when something else lies there by now."""
        try:
            snapshot = SnapshotFile(path, in_memory=True)
        except FileNotFoundError:
            return None
        with snapshot:
            if staged.index >= len(snapshot.headers):
                return None
            header = snapshot.headers[staged.index]
            with self._holds.on(path, header, staged):
                if not _is_there(header, staged):
                    return None
                try:
                    return self._copy(snapshot, staged)
                except ReplicaError:
                    if _is_there(header, staged):
                        raise
                    return None  # the rank wrote it over: the hold had lapsed

    def _succeeded(self, path: Path, staged: StagedSlot, era: int) -> None:
        with self._lock:
            if era == self._era:
                self._done.setdefault(path, set()).add(staged)
                self._failures.get(path, {}).pop(staged, None)

    def _failed(self, path: Path, staged: StagedSlot, era: int) -> None:
        with self._lock:
            if era != self._era:
                return
            failures = self._failures.setdefault(path, {})
            tries = failures[staged].tries + 1 if staged in failures else 1
            longest = min(_FIRST_WAIT_S * 2 ** (tries - 1), _LONGEST_WAIT_S)
            wait = longest * (0.5 + secrets.randbelow(1000) / 2000)
            failures[staged] = _Failure(tries=tries, again_at=time.monotonic() + wait)


def name_of(staged: StagedSlot) -> Name:
    """Return which snapshot lies in a slot."""
    return Name(attempt=staged.attempt, step=staged.step, rank=staged.rank, world=staged.world)


def _content(staged: StagedSlot) -> StagedSlot:
    """Leave out what changes while the content stays the same."""
    return replace(staged, upload_state=UploadState.NONE, held=False)


def _is_there(header: Header, staged: StagedSlot) -> bool:
    found = header.staged(staged.index)
    return found is not None and _content(found) == staged
