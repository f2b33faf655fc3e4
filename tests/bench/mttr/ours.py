"""everstep's recoveries, and how long each phase of them took by its own journal."""

import itertools
import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deploy.demo.processes import kill
from deploy.demo.run import DemoError, Run
from orchestrator.core.actions import StopRanks
from orchestrator.core.events import DecisionMade
from orchestrator.core.state import Incident
from tests.bench.mttr import machine as m

RANKS_PER_NODE = 1
STEP_S = 0.05
STEP_LIMIT_S = 8.0  # a hang is what this says; the default, 600, fits any job and finds one late
SETTLE_STEPS = 60
SETTLE_S = 6.0  # the zygotes of spares are as old as the run on a real cluster: let them be warm
PATIENCE_S = 90.0
PHASES = ("detect", "decide", "stop", "start", "rendezvous", "restore", "first step")

TOML = """\
[run]
name = "{name}"
[job]
command = ["python", "{script}", "{folder}", "{step_s}"]
workdir = "{folder}"
[nodes]
launcher = "slurm"
count = 3
spares = 1
ranks_per_node = {ranks}
[checkpoint]
store = "file://{store}"
interval_steps = 20
tune = false
[timeouts]
step_s = {step_limit_s}
kill_grace_s = 2.0
leave_s = 4.0
[budget]
process = 1000
node = 1000
node_strikes = 1000
[server]
host = "{host}"
[slurm]
partition = "batch"
options = {{ cpus-per-task = 2 }}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One recovery; `total_s` is measured as for all launchers."""

    total_s: float
    step_s: float
    phases: dict[str, float]
    load: float = field(default_factory=lambda: os.getloadavg()[0])


class OurRun(Run):
    """A run on the cluster, with the folder that its ranks write to."""

    folder: Path

    def alive(self) -> None:
        """Raise Failed when the supervisor is gone."""
        if self._process is not None and self._process.poll() is not None:
            raise m.Failed(f"the supervisor ended: {_tail(self.log_path)}")

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            kill(self._process.pid)
            self._process.wait()


@contextmanager
def started(machine: m.Machine) -> Iterator[OurRun]:
    """Start a run and wait until it trains and has saved; afterwards the nodes are idle again."""
    folder = machine.new_folder("ours")
    toml = folder / "run.toml"
    text = TOML.format(
        name=folder.name,
        script=Path(__file__).with_name("script.py"),
        folder=folder,
        step_s=STEP_S,
        step_limit_s=STEP_LIMIT_S,
        ranks=RANKS_PER_NODE,
        store=folder / "store",
        host=machine.cluster.env()["DEVCLUSTER_ADDRESS"],
    )
    (folder / "store").mkdir()
    toml.write_text(text, encoding="utf-8")
    run = OurRun(toml, dict(machine.cluster.env()), lambda _: None)
    run.folder = folder
    try:
        run.start()
        settle(run)
        yield run
    finally:
        run.close()
        machine.make_whole()


def settle(run: OurRun) -> None:
    """Wait for a while of undisturbed training and a checkpoint of it."""
    since = time.time()
    m.settled(run.folder, SETTLE_STEPS, since, PATIENCE_S, run.alive)
    time.sleep(max(0.0, SETTLE_S - (time.time() - m.steps(run.folder)[0].at)))
    run.refresh()
    base = run.state.commits[0][0] if run.state.commits else -1

    def saved() -> bool:
        run.refresh()
        return bool(run.state.commits) and run.state.commits[0][0] > base

    m.until("a checkpoint", saved, PATIENCE_S, run.alive)


def rank_killed(run: OurRun, number: int) -> Recovery:
    """SIGKILL one rank, another one each time."""
    rank = (1 + number) % (3 * RANKS_PER_NODE)
    return _recovery(run, m.signal_rank(run.folder, rank, signal.SIGKILL))


def rank_stopped(run: OurRun, number: int) -> Recovery:
    """SIGSTOP one rank, another one each time: it hangs, and all others with it."""
    rank = (1 + number) % (3 * RANKS_PER_NODE)
    return _recovery(run, m.signal_rank(run.folder, rank, signal.SIGSTOP))


def node_lost(machine: m.Machine, run: OurRun, place: int) -> Recovery:
    """Cut the power of the node at a place in the rank order; 0 hosts batch script and master."""
    assert run.state.attempt is not None
    return _recovery(run, machine.power_off(run.state.attempt.nodes[place]))


def _recovery(run: OurRun, fault_at: float) -> Recovery:
    known = len(run.state.incidents)
    before = [step.at for step in m.steps(run.folder)][-40:]
    new = m.first_new_step(run.folder, fault_at, PATIENCE_S, run.alive)

    def noted() -> bool:
        run.refresh()
        found, began = run.state.incidents, m.marks(run.folder, fault_at)
        is_noted = len(found) > known and found[-1].first_step_at is not None
        return is_noted and len(began) >= 3 * RANKS_PER_NODE

    try:
        m.until("the journal to tell of the recovery", noted, PATIENCE_S, run.alive)
    except DemoError as error:
        raise m.Failed(str(error)) from error
    return Recovery(
        total_s=new.at - fault_at,
        step_s=statistics.median(b - a for a, b in itertools.pairwise(before)),
        phases=_phases(run, run.state.incidents[-1], fault_at, new.at),
    )


def _phases(run: OurRun, incident: Incident, fault_at: float, new_at: float) -> dict[str, float]:
    """Cut the time from the fault to the new step: at the journal's records, then the ranks'.

    The supervisor hears of phases with the heartbeats, which are too seldom for this.
    """
    decided = [
        record.at
        for record in run.records
        if isinstance(record.event, DecisionMade)
        and isinstance(record.event.decision.action, StopRanks)
        and record.event.decision.action.attempt == incident.attempt
    ]
    began = m.marks(run.folder, fault_at)

    def last(mark: str) -> float:
        return max(marks[mark] for marks in began)

    ends = (
        incident.detected_at,
        decided[0] if decided else incident.stopped_at,
        incident.stopped_at,
        last("main"),
        last("ddp"),
        last("restore"),
        new_at,
    )
    found, begin = {}, fault_at
    for name, end in zip(PHASES, ends, strict=True):
        found[name], begin = end - begin, end
    return found


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"
