"""The parent of every daemon and node of one cluster.

It is a subreaper (PR_SET_CHILD_SUBREAPER), so orphans come to it and are reaped, also where pid 1
of the machine does not reap. Its children die when it dies (PR_SET_PDEATHSIG); with them go their
namespaces, and so the cluster's whole network. It knows units (a name and a process), not Slurm.

Commands come through a socket, one JSON object a line, one connection each:
    {"do": "start", "unit": NAME, "argv": [...], "env": {...}, "log": PATH, "cgroup": PATH|null}
    {"do": "signal", "unit": NAME, "signal": 9}    {"do": "units"}    {"do": "exit"}
The answer is one JSON object: units (name to pid and exit code), or error.
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.devcluster.processes import children, kill, start_time

SOCKET = "warden.socket"
PID_FILE = "warden.pid"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REQUEST_TIMEOUT_S = 5.0
ROUND_S = 1.0
_HANDLED = (signal.SIGTERM, signal.SIGCHLD)


def prctl(option: int, value: int) -> None:
    """Set a property of this process, as the manual page of prctl tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


class Warden:
    """Starts units, reaps whatever ends, answers on the socket."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SOCKET
        self._pids: dict[str, int] = {}
        self._exits: dict[str, int | None] = {}
        self._leaving = False

    def serve(self, ready: Callable[[], None]) -> None:
        """Run until told to exit; then end every child and come back.

        Args:
            ready: Called once, when requests are heard.
        """
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        woken, waker = socket.socketpair()
        for end in (woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._leave)
        with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            listener.listen(16)
            selector.register(listener, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            ready()
            while not self._leaving:
                for key, _ in selector.select(ROUND_S):
                    if key.fileobj is listener:
                        self._answer(listener)
                    else:
                        with suppress(BlockingIOError):
                            woken.recv(4096)
                self._reap()
            self._end_all()
            self._path.unlink(missing_ok=True)

    def _leave(self, *_: object) -> None:
        self._leaving = True

    def _answer(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.settimeout(REQUEST_TIMEOUT_S)
            try:
                with connection.makefile("r", encoding="utf-8") as lines:
                    answer = self.handle(json.loads(lines.readline()))
            except (OSError, ValueError, KeyError, TypeError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do one request and return its answer."""
        match request["do"]:
            case "start":
                self._start(request)
            case "signal":
                pid = self._pids.get(request["unit"])
                if pid is not None:
                    kill(pid, signal.Signals(request["signal"]))
            case "units":
                self._reap()
            case "exit":
                self._leaving = True
            case other:
                return {"error": f"unknown request {other!r}"}
        return {
            "units": {
                unit: {"pid": self._pids.get(unit), "exit": code}
                for unit, code in self._exits.items()
            }
        }

    def _start(self, request: dict[str, Any]) -> None:
        unit = request["unit"]
        if unit in self._pids:
            return
        argv, env = list(request["argv"]), dict(request["env"])
        parent = os.getpid()
        # A signal for the unit that came before it has left our handlers would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            pid = os.fork()
            if pid == 0:
                _become(argv, env, request["log"], request["cgroup"], parent)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        self._pids[unit] = pid
        self._exits[unit] = None

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for unit, its in tuple(self._pids.items()):
                    if its == pid:
                        del self._pids[unit]
                        self._exits[unit] = os.waitstatus_to_exitcode(status)

    def _end_all(self) -> None:
        """Kill children until none is left; the death of one may bring its orphans here."""
        with suppress(ChildProcessError):
            while True:
                for pid in children(os.getpid()):
                    kill(pid)
                os.waitpid(-1, 0)


def _become(
    argv: list[str], env: dict[str, str], log: str, cgroup: str | None, parent: int
) -> None:
    """Turn this fresh child into the unit's process; never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(126)
        os.setsid()
        if cgroup is not None:
            Path(cgroup, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execve(argv[0], argv, env)  # noqa: S606
    except OSError as error:
        with suppress(OSError):
            os.write(2, f"devcluster: cannot start {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def main(folder: Path) -> None:
    """Go on in a child of its own session; this process ends when that one hears requests."""
    heard, tell = os.pipe()
    if os.fork():
        os.close(tell)
        os._exit(0 if os.read(heard, 1) else 1)
    os.setsid()
    (folder / PID_FILE).write_text(f"{os.getpid()} {start_time(os.getpid())}\n", encoding="ascii")

    def ready() -> None:
        os.write(tell, b"1")
        os.close(tell)

    Warden(folder).serve(ready)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
