"""Processes that answer: one JSON object per line, asked and answered."""

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
ANSWER_S = 180.0
_LEAVE_S = 10.0
_PR_SET_PDEATHSIG = 1  # source: prctl(2)


class Failed(Exception):
    """Something did not do what was to be measured; one line."""


class Child:
    """A process that serves (see `serve`), in a process group of its own.

    Args:
        name: For messages.
        argv: Arguments of the interpreter.
        log: Takes its standard error.
        environment: Its variables.
        python: The interpreter.
        core: The only core that it may run on.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        python: Path | None = None,
        core: int | None = None,
    ) -> None:
        self._name = name
        self._log = log
        with log.open("ab") as errors, on_core(core):
            self.process = subprocess.Popen(
                [str(python or sys.executable), *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
                start_new_session=True,  # a Ctrl-C is for the bench, which ends all of it
            )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, do: str, **arguments: Any) -> None:
        """Ask for something."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"{self._name} ended: {self._last_words()}") from None

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """Wait for the answer.

        Raises:
            Failed: It answered with an error, ended, or did not answer in time.
        """
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise Failed(f"{self._name} did not answer within {timeout_s:.0f} s") from None
        if answer is None:
            raise Failed(f"{self._name} ended: {self._last_words()}")
        if "error" in answer:
            raise Failed(f"{self._name}: {answer['error']}")
        return answer["ok"]

    def ask(self, do: str, **arguments: Any) -> Any:
        """Ask and wait."""
        self.send(do, **arguments)
        return self.answer()

    def close(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_LEAVE_S)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:300] if said else "it said nothing"


class World:
    """The ranks: asked together, answering together."""

    def __init__(self, ranks: Sequence[Child]) -> None:
        self.ranks = ranks

    def ask(self, do: str, *, timeout_s: float = ANSWER_S, **arguments: Any) -> list[Any]:
        """Ask all ranks the same; return their answers in order.

        Raises:
            Failed: One of them could not.
        """
        self.send(do, **arguments)
        return self.answers(timeout_s)

    def send(self, do: str, **arguments: Any) -> None:
        """Ask all ranks the same."""
        for rank in self.ranks:
            rank.send(do, **arguments)

    def answers(self, timeout_s: float = ANSWER_S) -> list[Any]:
        """Wait for all; who waits for a rank that has failed is not waited for."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, Any] = {}
        while len(found) < len(self.ranks):
            for number, rank in enumerate(self.ranks):
                if number in found:
                    continue
                try:
                    found[number] = rank.answer(0.05)
                except Failed as error:
                    if "did not answer" not in str(error) or time.monotonic() > deadline:
                        raise
        return [found[number] for number in range(len(self.ranks))]

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [rank.process.pid for rank in self.ranks]

    def close(self) -> None:
        """End all ranks."""
        for rank in self.ranks:
            rank.close()


def die_with_parent() -> None:
    """End when the parent does, however it ends, and before anything is asked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def serve(handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests of the parent until it is gone; whatever is printed goes to the log."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            ask = json.loads(line)
            try:
                answer = {"ok": handlers[ask.pop("do")](**ask)}
            except Exception as error:  # noqa: BLE001 - the parent tells
                text = " ".join(str(error).split())
                answer = {"error": f"{type(error).__name__}: {text[-300:]}"}
            out.write(json.dumps(answer) + "\n")
            out.flush()


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Let the processes that are started here run on one core only; None for all."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used; source: proc_pid_stat(5), fields 14, 15."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
