"""Keeps a rank alive when somebody other than its agent sends SIGTERM.

Slurm signals every process of a step at a time limit or a preemption. A rank that died of that
would take along what it could still have saved: the agent stops ranks at a step boundary instead.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_NOTE = b"everstep: SIGTERM that the agent did not announce; going on until the agent says so\n"


class TermGuard:
    """A handler of SIGTERM; make one with `install`.

    Python runs it between two instructions of the main thread, so never while that waits inside a
    library for a rank that is dead. Who wants to end a guarded process has to use SIGKILL.
    """

    def __init__(self, announced: Callable[[], bool]) -> None:
        self._announced = announced
        self._owner = os.getpid()
        self._noted = False

    @classmethod
    def install(cls, announced: Callable[[], bool]) -> "TermGuard | None":
        """Take SIGTERM, unless the script handles it or this is not the main thread.

        Args:
            announced: Whether the agent wants this process to end.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        former = signal.getsignal(signal.SIGTERM)
        if former is not signal.SIG_DFL and not isinstance(_owner(former), cls):
            return None
        if former is signal.SIG_DFL:
            _FORKS.watch()
        guard = cls(announced)
        signal.signal(signal.SIGTERM, guard._handle)
        # What libraries wait for is to go on as if nothing had been sent.
        signal.siginterrupt(signal.SIGTERM, False)
        return guard

    @property
    def holds(self) -> bool:
        """Whether SIGTERM is still this guard's, and not the script's by now."""
        return _owner(signal.getsignal(signal.SIGTERM)) is self

    def _handle(self, signum: int, _: FrameType | None) -> None:
        # Not the owner: a child that was forked behind the interpreter's back.
        if os.getpid() != self._owner or self._announced():
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        elif not self._noted:
            self._noted = True
            with contextlib.suppress(OSError):  # not sys.stderr: it may be in the middle of a line
                os.write(2, _NOTE)


def _owner(handler: object) -> object:
    return getattr(handler, "__self__", None)


class _Forks:
    """Gives forked children the default action: who started them may end them by SIGTERM.

    One that is sent before the child has it would be lost, so it waits until then.
    """

    def __init__(self) -> None:
        self._watched = False
        self._forking = threading.local()

    def watch(self) -> None:
        """Look after every fork of this process from now on."""
        if not self._watched:
            self._watched = True
            os.register_at_fork(
                before=self._before, after_in_parent=self._after, after_in_child=self._in_child
            )

    def _before(self) -> None:
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _after(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _in_child(self) -> None:
        if isinstance(_owner(signal.getsignal(signal.SIGTERM)), TermGuard):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._after()


_FORKS = _Forks()
