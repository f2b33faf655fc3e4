"""One supervised run as a user has it: a TOML, the command line, and the journal to look at."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deploy.demo.processes import agent_pid, end_run, is_alive, kill, power_off
from orchestrator.agent.lifeline import die_with_parent
from orchestrator.config import RunConfig, load
from orchestrator.core.events import RanksStarted
from orchestrator.core.record import Record
from orchestrator.core.state import State
from orchestrator.errors import EverstepError
from orchestrator.supervisor.journal import read_records
from orchestrator.views.history import History

POLL_S = 0.1
PATIENCE_S = 180.0

TOML = """\
# Written by the demo; a run file of your own looks the same.
[run]
name = "{name}"

[job]
command = {command}
workdir = {workdir}
preload = ["numpy", "torch"]

[nodes]
count = 2
spares = 1
ranks_per_node = 2

[checkpoint]
store = "{store}"
endpoint_url = "{endpoint}"
region = "us-east-1"
interval_steps = 60
# The demo breaks the run about every 20 seconds; a real fleet says 10 to 30 here.
prior_faults_per_1000_node_days = 2_000_000.0
max_lost_work_s = 10.0
max_overhead = 0.2

[timeouts]
heartbeat_s = 0.2
agent_lost_s = 10.0
step_s = 60.0
init_s = 120.0
kill_grace_s = 3.0
# Of a demo that was killed itself nothing is left after a minute.
supervisor_lost_s = 60.0
"""


class DemoError(Exception):
    """The demo did not go as told; one line that names the log to read."""


class Run:
    """Starts, watches and breaks one run.

    Attributes:
        records: The journal as last read.
        fresh: What the last look at the journal added.
    """

    def __init__(self, toml: Path, env: dict[str, str], look: Callable[["Run"], None]) -> None:
        self.config: RunConfig = load(toml)
        self.state = State()
        self.history = History()
        self.records: tuple[Record, ...] = ()
        self.fresh: tuple[Record, ...] = ()
        self._toml = toml
        self._env = env
        self._look = look
        self._process: subprocess.Popen[bytes] | None = None
        self._news_at = time.monotonic()

    @property
    def name(self) -> str:
        """The run's name."""
        return self.config.run.name

    @property
    def log_path(self) -> Path:
        """Where the supervisor writes what it says."""
        return self._toml.with_name(f"{self.name}.log")

    def start(self) -> None:
        """Start the supervisor: `everstep run NAME.toml --plain`."""
        self._news_at = time.monotonic()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator", "run", str(self._toml), "--plain"],
                env={**os.environ, **self._env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C is for the demo to handle
                preexec_fn=die_with_parent,  # noqa: PLW1509 - it only calls prctl
            )

    def refresh(self) -> None:
        """Read the journal again; there may be none yet."""
        try:
            records = read_records(self.config.run_dir / "journal.jsonl")
        except EverstepError:
            return
        self.fresh = records[len(self.records) :]
        if self.fresh:
            self._news_at = time.monotonic()
            self.records = records
            self.state, self.history = History.of(records)

    def wait(self, what: str, reached: Callable[[State], bool]) -> None:
        """Watch until a condition holds.

        Raises:
            DemoError: No news within the demo's patience, or the supervisor is gone.
        """
        while True:
            self.refresh()
            self._look(self)
            if reached(self.state):
                return
            if self._process is not None and self._process.poll() is not None:
                code = self._process.returncode
                raise DemoError(f"the supervisor ended with {code}; read {self.log_path}")
            if self._is_stuck:
                raise DemoError(f"{what} did not come; read {self.log_path}")
            time.sleep(POLL_S)

    def join(self) -> None:
        """Wait for the supervisor's clean end."""
        assert self._process is not None
        while self._process.poll() is None and not self._is_stuck:
            self.refresh()
            self._look(self)
            time.sleep(POLL_S)
        self.refresh()
        self._look(self)
        if self._process.poll() != 0:
            raise DemoError(f"{self.name} ended with {self._process.poll()}; read {self.log_path}")

    @property
    def _is_stuck(self) -> bool:
        """Whether the journal has had nothing new for longer than the demo waits."""
        return time.monotonic() - self._news_at > PATIENCE_S

    def rank_pids(self) -> dict[int, int]:
        """Return the pid of every rank of the newest attempt."""
        pids: dict[int, int] = {}
        for record in self.records:
            event = record.event
            if isinstance(event, RanksStarted) and event.attempt == self.state.last_attempt:
                pids |= dict(zip(event.ranks, event.pids, strict=True))
        return pids

    def kill_rank(self, rank: int) -> None:
        """SIGKILL one rank."""
        kill(self.rank_pids()[rank])

    def kill_node(self, node: str) -> None:
        """End a node with everything on it."""
        assert is_alive(agent_pid(self.config.run_dir, node))
        power_off(self.config, node)

    def kill_supervisor(self) -> None:
        """SIGKILL the supervisor."""
        assert self._process is not None
        kill(self._process.pid)
        self._process.wait()

    def steps_done(self) -> int:
        """Return the last step in the job's own record, which needs no supervisor."""
        try:
            lines = (self.config.run_dir / "output" / "metrics.jsonl").read_text("utf-8")
            return int(json.loads(lines.rstrip("\n").rpartition("\n")[2])["step"])
        except (OSError, ValueError, KeyError):
            return 0

    def close(self) -> None:
        """Leave nothing running."""
        process = self._process
        alive = process.pid if process is not None and process.poll() is None else None
        end_run(self.config, alive)
        if process is not None:
            process.wait()


def _toml(value: str | list[str]) -> str:
    """Return the value as TOML, which is JSON here but for surrogate pairs."""
    return json.dumps(value, ensure_ascii=False)


def write_toml(path: Path, name: str, command: list[str], store: str, endpoint: str) -> Path:
    """Write a run file; paths in it are absolute."""
    text = TOML.format(
        name=name,
        command=_toml(command),
        workdir=_toml(str(Path.cwd())),
        store=store,
        endpoint=endpoint,
    )
    path.write_text(text, encoding="utf-8")
    return path
