"""The four nodes that everything runs on, the faults to the instant, and the steps as measured."""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.devcluster import daemons, faults, lifecycle, state
from deploy.devcluster.client import Devcluster
from deploy.devcluster.units import Units
from tests.integration.devclusters import shares

NODES = 4
SETTINGS = ("SlurmdTimeout=15", "KillWait=5")
QUIET_S = 60.0
POLL_S = 0.02
CLOSING_S = 1.0


class Failed(Exception):
    """A launcher did not do what was to be measured; one line."""


@dataclass(frozen=True, slots=True)
class Step:
    """A finished step, as rank 0 noted it; `life` names the process."""

    life: str
    step: int
    at: float


@dataclass(slots=True)
class Machine:
    """The cluster and a folder that all its nodes see."""

    cluster: Devcluster
    folder: Path
    made: int = 0

    def new_folder(self, word: str) -> Path:
        """Return an empty folder for one run."""
        self.made += 1
        path = self.folder / f"{word}-{self.made}"
        path.mkdir()
        return path

    def power_off(self, node: str) -> float:
        """Cut a node's power; returns when, without the time that a command takes to start."""
        plan = state.existing(self.cluster.name)
        with state.locked(plan.state):
            at = time.time()
            faults.power_off(plan, Units(plan.state), plan.node(node))
        return at

    def crash(self, node: str) -> float:
        """End all processes of a node, its kernel closing their connections; returns when.

        Kinder than a power loss: peers learn of it at once. Elastic launchers need that, because
        nothing else tells their ranks to give up a collective before its timeout of minutes.
        """
        plan = state.existing(self.cluster.name)
        with state.locked(plan.state):
            units = Units(plan.state)
            init = daemons.init_pid(units, node)
            if init is None:
                raise Failed(f"{node} is off")
            at = time.time()
            os.kill(init, signal.SIGKILL)
            time.sleep(CLOSING_S)
            faults.power_off(plan, units, plan.node(node))
        return at

    def make_whole(self) -> None:
        """End all jobs, have all nodes back and idle.

        Raises:
            Failed: They did not come back.
        """
        for name, node in self.cluster.nodes().items():
            if not node["power"]:
                self.cluster.do("power-on", name)
        deadline = time.monotonic() + QUIET_S
        while True:
            # Each time: a child of a supervisor that was killed may still be submitting.
            self.cluster.slurm("scancel", "--full", "--user=root")
            seen = {name: node["slurm"] for name, node in self.cluster.nodes().items()}
            if all(word == "idle" for word in seen.values()):
                return
            if time.monotonic() > deadline:
                raise Failed(f"the nodes did not become idle again: {seen}")
            time.sleep(0.5)


@contextlib.contextmanager
def running(with_folders: tuple[Path, ...] = ()) -> Iterator[Machine]:
    """Bring the cluster up; nothing is left of it afterwards, after Ctrl-C and SIGTERM as well."""
    lifecycle.stop_on_signals()
    with tempfile.TemporaryDirectory(prefix="everstep-mttr-") as name:
        folder = Path(name).resolve()
        options = ["--nodes", str(NODES), "--gpus", "2"]
        options += [word for setting in SETTINGS for word in ("--set", setting)]
        with Devcluster(f"mttr{os.getpid()}", *options, *shares(folder, *with_folders)) as cluster:
            yield Machine(cluster, folder)


def signal_rank(folder: Path, rank: int, number: signal.Signals) -> float:
    """Send a signal to the newest process of a rank; returns when."""
    me = [line for line in _lines(folder / "ranks") if line["rank"] == rank][-1]
    pid = _pid_here(me["pid"], me["pids_of"])
    at = time.time()
    os.kill(pid, number)
    return at


def _pid_here(pid: int, space: str) -> int:
    """Return the pid on this machine of a process that a node knows by another."""
    for link in Path("/proc").glob("[0-9]*/ns/pid"):
        with contextlib.suppress(OSError):
            if str(link.readlink()) != space:
                continue
            status = (link.parents[1] / "status").read_text(encoding="utf-8", errors="replace")
            inner = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            if int(inner.split()[-1]) == pid:
                return int(link.parents[1].name)
    raise Failed(f"no process {pid} in {space}")


def steps(folder: Path) -> list[Step]:
    """Return all finished steps so far."""
    return [Step(**line) for line in _lines(folder / "steps")]


def marks(folder: Path, after: float) -> list[dict[str, float]]:
    """Return the instants that the ranks which began after `after` noted of their own start."""
    found = [line["marks"] for line in _lines(folder / "ranks")]
    return [mark for mark in found if mark["import"] > after]


def settled(
    folder: Path, count: int, since: float, patience_s: float, alive: Callable[[], None]
) -> None:
    """Wait until one and the same process has finished `count` steps after an instant."""

    def reached() -> bool:
        done = [step for step in steps(folder) if step.at > since]
        return bool(done) and sum(step.life == done[-1].life for step in done) >= count

    until("training to settle", reached, patience_s, alive)


def first_new_step(
    folder: Path, fault_at: float, patience_s: float, alive: Callable[[], None]
) -> Step:
    """Wait for the first step of a process that had finished none before the fault."""
    old = {step.life for step in steps(folder) if step.at <= fault_at}
    found: list[Step] = []

    def reached() -> bool:
        found[:] = [s for s in steps(folder) if s.at > fault_at and s.life not in old]
        return bool(found)

    until("the first new step", reached, patience_s, alive)
    return found[0]


def until(
    what: str, reached: Callable[[], bool], patience_s: float, alive: Callable[[], None]
) -> None:
    """Wait for a condition; `alive` raises Failed when waiting has become pointless."""
    deadline = time.monotonic() + patience_s
    while not reached():
        alive()
        if time.monotonic() > deadline:
            raise Failed(f"{what} did not come within {patience_s:.0f} s")
        time.sleep(POLL_S)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
