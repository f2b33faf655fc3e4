"""The commands' side of the warden: start it, ask it, find out what became of it."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.devcluster.errors import DevclusterError
from deploy.devcluster.plan import console
from deploy.devcluster.processes import MARK, is_alive, kill, marked, start_time, wait_until
from deploy.devcluster.programs import PATH, found
from deploy.devcluster.warden import PID_FILE, SOCKET

CHECKOUT = Path(__file__).resolve().parents[2]
ANSWER_TIMEOUT_S = 10.0
START_TIMEOUT_S = 10.0
END_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A daemon or node: `pid` while it runs, `exit` once it has ended (negative: a signal)."""

    pid: int | None
    exit: int | None


class Units:
    """The units of the cluster whose state is in a folder."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def base_env(self) -> dict[str, str]:
        """Return the whole environment of a unit: short, and marked as this cluster's."""
        return {
            "PATH": PATH,
            "LANG": "C.UTF-8",
            "HOME": "/root",
            MARK: str(self._state),
            "SLURM_CONF": str(self._state / "slurm.conf"),
        }

    def warden_pid(self) -> int | None:
        """Return the pid of the warden, or None when it does not run."""
        with suppress(OSError, ValueError):
            pid, started = (self._state / PID_FILE).read_text(encoding="ascii").split()
            if start_time(int(pid)) == int(started):
                return int(pid)
        return None

    def open(self) -> None:
        """Start the warden.

        Raises:
            DevclusterError: It does not come up; the message names its log.
        """
        log = console(self._state, "warden")
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            done = subprocess.run(
                [*python("warden"), str(self._state)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.base_env(),
                cwd="/",
                timeout=START_TIMEOUT_S,
                check=False,
            )
        if done.returncode != 0:
            raise DevclusterError(f"the warden does not start: {_last_line(log)}; see {log}")

    def all(self) -> dict[str, Unit]:
        """Return every unit that was ever started; none when the warden is gone."""
        if self.warden_pid() is None:
            return {}
        answer = self._ask({"do": "units"})
        return {name: Unit(**values) for name, values in answer["units"].items()}

    def pid(self, unit: str) -> int | None:
        """Return the pid of a unit that runs."""
        its = self.all().get(unit)
        return its.pid if its is not None else None

    def start(
        self,
        unit: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cgroup: Path | None = None,
    ) -> None:
        """Start a unit; one that runs is left alone.

        Args:
            unit: Its name; also that of its log.
            argv: The program and its arguments.
            env: Its whole environment; the base environment when None.
            cgroup: Folder of the CPU cgroup it and all its descendants belong to.
        """
        self._ask(
            {
                "do": "start",
                "unit": unit,
                "argv": [found(argv[0]), *argv[1:]],
                "env": dict(env if env is not None else self.base_env()),
                "log": str(console(self._state, unit)),
                "cgroup": str(cgroup) if cgroup is not None else None,
            }
        )

    def stop(self, unit: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End a unit and wait; after some time with SIGKILL."""
        self._ask({"do": "signal", "unit": unit, "signal": int(number)})
        try:
            wait_until(f"{unit} ends", lambda: self.pid(unit) is None, END_TIMEOUT_S)
        except DevclusterError:
            self._ask({"do": "signal", "unit": unit, "signal": int(signal.SIGKILL)})
            wait_until(f"{unit} ends when killed", lambda: self.pid(unit) is None, END_TIMEOUT_S)

    def wait_ready(self, unit: str, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a unit that was started is ready.

        Raises:
            DevclusterError: It ended or is not ready in time; names its log.
        """
        log = console(self._state, unit)
        wait_until(
            f"{unit} does not get ready; see {log}",
            lambda: ready() or self.pid(unit) is None,
            timeout_s,
        )
        if self.pid(unit) is None:
            raise DevclusterError(f"{unit} ended: {_last_line(log)}; see {log}")

    def close(self) -> None:
        """End the warden and everything below it, also what a crash left; wait until gone."""
        pid = self.warden_pid()
        if pid is not None:
            with suppress(DevclusterError):
                self._ask({"do": "exit"})
                wait_until("the warden ends", lambda: not is_alive(pid), END_TIMEOUT_S)
            kill(pid)
        for left in marked(self._state):
            kill(left)
        wait_until("all processes end", lambda: not marked(self._state), END_TIMEOUT_S)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(ANSWER_TIMEOUT_S)
                connection.connect(str(self._state / SOCKET))
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("r", encoding="utf-8") as lines:
                    answer: dict[str, Any] = json.loads(lines.readline())
        except (OSError, ValueError) as error:
            raise DevclusterError(f"the warden of {self._state.name} says nothing: {error}") from (
                error
            )
        if "error" in answer:
            raise DevclusterError(f"the warden of {self._state.name}: {answer['error']}")
        return answer


def python(module: str) -> list[str]:
    """Return the command that runs a module of this package, alone and from this checkout."""
    bootstrap = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
        "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    )
    flags = ("-I", "-S", "-B")
    return [sys.executable, *flags, "-c", bootstrap, str(CHECKOUT), f"deploy.devcluster.{module}"]


def _last_line(log: Path) -> str:
    with suppress(OSError, IndexError):
        return log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
    return "it said nothing"
