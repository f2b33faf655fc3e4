"""Parts in parallel: whoever is late is sent a second time, the first answer counts."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from checkpointing.store.hedge import Hedger

_LOOK_S: Final = 0.05
_LEAVE_S: Final = 5.0
_Answer = TypeVar("_Answer")

SendPart = Callable[[int, threading.Event], _Answer]
"""Sends the part with this index; the event says that nobody waits for it any more."""


@dataclass(slots=True, kw_only=True)
class _Sending:
    """One thread that sends one part."""

    index: int
    hedge: bool
    begun: float
    cancelled: threading.Event = field(default_factory=threading.Event)


class Parts(Generic[_Answer]):
    """Sends `count` parts with some threads, and returns their answers in order.

    Args:
        count: Number of parts.
        send: Sends one.
        threads: Most parts in flight, a hedge not counted.
        may_hedge: Tells whether sending something twice is all right now.
        hedged: Called for every part that is sent a second time.
    """

    def __init__(
        self,
        count: int,
        send: SendPart[_Answer],
        *,
        threads: int,
        may_hedge: Callable[[], bool],
        hedged: Callable[[], None],
    ) -> None:
        self._count = count
        self._send = send
        self._threads = threads
        self._may_hedge = may_hedge
        self._hedged = hedged
        self._hedger = Hedger()
        self._changed = threading.Condition()
        self._next = 0
        self._running: list[_Sending] = []
        self._done: dict[int, _Answer] = {}
        self._twice: set[int] = set()
        self._error: BaseException | None = None

    def run(self) -> list[_Answer]:
        """Send them all.

        Raises:
            BaseException: The first error of a part; the others have been told to give up.
        """
        workers = [
            self._start(f"part-{at}", self._work) for at in range(min(self._threads, self._count))
        ]
        try:
            with self._changed:
                while self._error is None and len(self._done) < self._count:
                    self._changed.wait(self._look_for_late())
        finally:
            with self._changed:
                self._next = self._count
                for sending in self._running:
                    sending.cancelled.set()
        if self._error is not None:
            # What is still being sent would become a part of an upload that was just aborted.
            deadline = time.monotonic() + _LEAVE_S
            for worker in workers:
                worker.join(max(0.0, deadline - time.monotonic()))
            raise self._error
        return [self._done[index] for index in range(self._count)]

    def _start(
        self, name: str, target: Callable[..., None], *arguments: object
    ) -> threading.Thread:
        # Daemons: the loser of a race may still wait for its answer when the upload is over.
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        while True:
            with self._changed:
                index = self._next
                if index >= self._count:
                    return
                self._next += 1
            self._try(index, False)

    def _try(self, index: int, hedge: bool) -> None:
        sending = _Sending(index=index, hedge=hedge, begun=time.monotonic())
        with self._changed:
            if index in self._done:
                return
            self._running.append(sending)
        answer: _Answer | None = None
        error: BaseException | None = None
        try:
            answer = self._send(index, sending.cancelled)
        except BaseException as raised:  # noqa: BLE001 - the thread that waits raises it
            error = raised
        with self._changed:
            self._running.remove(sending)
            others = [other for other in self._running if other.index == index]
            if error is None and index not in self._done:
                assert answer is not None
                self._done[index] = answer
                self._hedger.finished(time.monotonic() - sending.begun)
                for other in others:
                    other.cancelled.set()
            elif error is not None and index not in self._done and not others:
                self._error = self._error or error
                self._next = self._count
            self._changed.notify_all()

    def _look_for_late(self) -> float | None:
        """Send the latest part again if it is late; return when to look next (lock held)."""
        late_after_s = self._hedger.late_after_s
        if late_after_s is None:
            return None
        waiting = [one for one in self._running if one.index not in self._twice]
        if any(one.hedge for one in self._running) or not waiting or not self._may_hedge():
            return _LOOK_S
        oldest = min(waiting, key=lambda one: one.begun)
        if time.monotonic() - oldest.begun > late_after_s:
            self._twice.add(oldest.index)
            self._hedged()
            self._start("hedge", self._try, oldest.index, True)
        return _LOOK_S
