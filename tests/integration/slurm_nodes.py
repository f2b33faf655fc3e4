"""A run on a real Slurm as its journal tells it, and processes started by hand on its nodes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from deploy.demo.processes import descendants, is_alive, kill
from deploy.demo.run import Run
from deploy.devcluster.client import Devcluster
from orchestrator.core.events import LeaseTaken, RanksStarted
from orchestrator.core.state import State
from orchestrator.launch.slurm_text import JobView
from orchestrator.supervisor.journal import parse
from tests.integration.devclusters import PATIENCE_S, jobs_of

TOML = """\
[run]
name = "{name}"

[job]
command = ["python", "{script}", "{seconds}", "{gate}"]
workdir = "{workdir}"
preload = []

[nodes]
launcher = "slurm"
count = {count}
ranks_per_node = 2

[slurm]
partition = "batch"
exclude = "{exclude}"
prologue = ["env | cut -d= -f1 > {workdir}/names-$SLURM_JOB_NAME"]

[timeouts]
heartbeat_s = 0.2
agent_lost_s = 4.0
kill_grace_s = 1.0
leave_s = 2.0
launch_s = 60.0
"""
SCRIPT = Path(__file__).parents[1] / "data" / "short_job.py"


class WatchedRun(Run):
    """A run whose supervisor is somewhere else."""

    toml: Path
    gate: Path
    cluster: Devcluster

    @classmethod
    def write(
        cls, folder: Path, cluster: Devcluster, name: str, *, count: int, exclude: str
    ) -> Self:
        toml, gate = folder / f"{name}.toml", folder / "gate"
        text = TOML.format(
            name=name,
            script=SCRIPT,
            seconds=140,
            gate=gate,
            workdir=folder,
            count=count,
            exclude=exclude,
        )
        toml.write_text(text, encoding="utf-8")
        run = cls(toml, dict(cluster.env()), lambda _: None)
        run.toml, run.gate, run.cluster = toml, gate, cluster
        return run

    def jobs(self, suffix: str = "") -> tuple[JobView, ...]:
        return jobs_of(self.cluster, f"everstep-{self.name}{suffix}")

    def until_over(self) -> None:
        self.gate.touch()
        self.wait("the end", lambda state: state.over)

    @property
    def holder(self) -> str:
        """Host and pid of the newest supervisor."""
        return [r.event.holder for r in self.records if isinstance(r.event, LeaseTaken)][-1]

    def starts(self) -> list[RanksStarted]:
        """All starts of ranks so far: there must be one per node."""
        return [r.event for r in self.records if isinstance(r.event, RanksStarted)]

    def epochs_as_written(self) -> list[int]:
        """The epoch of each line of the journal, also of those that do not count."""
        raw = (self.config.run_dir / "journal.jsonl").read_bytes()
        return [parse(line).epoch for line in raw.splitlines(keepends=True)]

    def notes(self) -> list[list[str]]:
        text = (self.config.run_dir / "output" / "notes").read_text(encoding="utf-8")
        return sorted(line.split() for line in text.splitlines())


def all_ranks_started(state: State) -> bool:
    attempt = state.attempt
    return attempt is not None and attempt.started_nodes >= set(attempt.nodes)


class OnNode:
    """A program started by hand on a node."""

    def __init__(self, cluster: Devcluster, node: str, words: Sequence[str], log: Path) -> None:
        command = [sys.executable, "-m", "orchestrator", *words]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                cluster.argv("shell", node, "--", *command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=Path(__file__).parents[2],
                start_new_session=True,
            )
        self.log = log

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the program itself, not to what brought it onto the node."""
        os.kill(descendants(self._process.pid)[0], signum)

    def go_on(self) -> None:
        """Undo SIGSTOP; what brought it onto the node stopped as well."""
        self.send(signal.SIGCONT)
        os.kill(self._process.pid, signal.SIGCONT)

    def code(self) -> int:
        """Wait for the end."""
        return self._process.wait(PATIENCE_S)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        pids = (*descendants(self._process.pid), self._process.pid)
        for pid in pids:
            kill(pid)
        self._process.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while any(is_alive(pid) for pid in pids[:-1]) and time.monotonic() < deadline:
            time.sleep(0.05)
