"""One story: a run on a real Slurm, something that happens to it, and what must hold afterwards."""

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpointing.content import content_sha256
from checkpointing.store.base import StoreConfig, open_store
from deploy.demo.processes import kill
from deploy.demo.run import DemoError, Run
from deploy.devcluster.client import Devcluster
from orchestrator.core import events as ev
from orchestrator.core.actions import Outcome, StartRanks
from orchestrator.core.events import Event
from orchestrator.core.record import Record
from orchestrator.core.state import Incident, State
from orchestrator.exit_codes import ExitCode
from orchestrator.views.replay import replay
from tests.chaos.nodes import Process, is_slurm, memory, power, processes
from tests.integration.devclusters import eventually, jobs_of
from tests.integration.traces import memory_of, processes_of

DATA = Path(__file__).parents[1] / "data"
STEPS = 1000  # never reached at the pace of a story; at full speed a matter of seconds
STEP_S = 0.05
INTERVAL = 20
RANKS = 2
PATIENCE_S = 60.0
POLL_S = 0.02

TOML = """\
[run]
name = "{name}"

[job]
command = ["python", "{script}", "{steps}", "{step_s}", "{gate}"{more}]
workdir = "{folder}"
preload = ["numpy"]

[nodes]
launcher = "slurm"
count = {count}
spares = {spares}
ranks_per_node = {ranks}
{nodes}

[checkpoint]
store = "file://{store}"
interval_steps = {interval}
tune = false
{checkpoint}

[server]
host = "{host}"

[slurm]
partition = "batch"
options = {{ exclusive = true, mem = 0 }}
{slurm}

[timeouts]
heartbeat_s = 0.2
agent_lost_s = 4.0
step_s = 30.0
init_s = 60.0
kill_grace_s = 1.0
leave_s = 8.0
launch_s = 60.0
start_s = 30.0
{timeouts}

[budget]
{budget}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a story wants otherwise than the others.

    Attributes:
        nodes: Lines for a table of the TOML; so are all that are empty below.
        host: Where the agents find the supervisor; this machine when it is not given.
        words: Further arguments of the script.
    """

    count: int = 2
    spares: int = 1
    nodes: str = "replace = false"
    checkpoint: str = ""
    slurm: str = ""
    timeouts: str = ""
    budget: str = ""
    host: str = ""
    words: tuple[str, ...] = ()


class Story(Run):
    """A run of `adding_job.py` on two nodes with a spare, in a folder that all nodes see."""

    def __init__(self, cluster: Devcluster, folder: Path, name: str, setting: Setting) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster, self.setting, self.folder = cluster, setting, folder
        self.gate, self.store = folder / "gate", folder / "store"
        self.store.mkdir(exist_ok=True)
        self.inits = power(cluster)
        self.began = time.monotonic()
        env = dict(cluster.env())
        toml = folder / f"{name}.toml"
        host = setting.host or env["DEVCLUSTER_ADDRESS"]
        toml.write_text(self._render(name, host), encoding="utf-8")
        super().__init__(toml, env, lambda _: None)

    def _render(self, name: str, host: str) -> str:
        setting = self.setting
        return TOML.format(
            name=name,
            script=DATA / "adding_job.py",
            steps=STEPS,
            step_s=STEP_S,
            gate=self.gate,
            more="".join(f', "{word}"' for word in setting.words),
            folder=self.folder,
            count=setting.count,
            spares=setting.spares,
            ranks=RANKS,
            nodes=setting.nodes,
            store=self.store,
            interval=INTERVAL,
            checkpoint=setting.checkpoint,
            host=host,
            slurm=setting.slurm,
            timeouts=setting.timeouts,
            budget=setting.budget,
        )

    def mark(self, what: str) -> None:
        """Note in the test's output when something was reached."""
        print(f"{time.monotonic() - self.began:6.1f} s  {what}")

    # --- what a story does -----------------------------------------------------------------------

    def begin(self, *, late: str = "", on: str = "") -> None:
        """Start, and go on until all nodes are there and something is saved and can be lost.

        Args:
            late: A node that comes after the others, so that it is the spare.
            on: The node that the supervisor runs on; this machine when it is not given.
        """
        if late:
            self.cluster.do("throttle", late, "--cpu", "0.05")
        if on:
            self.has_supervisor(self.start_on(on))
        else:
            self.start()
        if late:
            self.wait("the first attempt", lambda state: state.last_attempt == 1)
            self.cluster.do("heal", late)
        wanted = self.setting.count + self.setting.spares
        self.wait(
            "all nodes and a checkpoint",
            lambda state: (
                bool(state.commits) and is_stepping(state) and len(living(state)) == wanted
            ),
        )
        self.mark("trains and has saved")

    def start_on(self, node: str, *options: str) -> "subprocess.Popen[bytes]":
        """Start a supervisor on a node instead of on this machine; with `host = "auto"`."""
        words = (sys.executable, "-m", "orchestrator", "run", str(self._toml), "--plain", *options)
        self._news_at = time.monotonic()
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self.cluster.argv("shell", node, "--", *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def has_supervisor(self, process: "subprocess.Popen[bytes]") -> None:
        """Take another process for the run's supervisor; the one before is dead."""
        if self._process is not None:
            kill(self._process.pid)  # whatever of it was on this machine
            self._process.wait(PATIENCE_S)
        self._process = process

    def soon(self, what: str, reached: Callable[[State], bool]) -> None:
        """As `wait`, for moments that pass quickly; also while no supervisor runs."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.refresh()
            if reached(self.state):
                return
            if time.monotonic() > deadline:
                raise DemoError(f"{what} did not come; read {self.log_path}")
            time.sleep(POLL_S)

    def goes_on(self, attempt: int) -> None:
        """Wait until a later attempt trains and has saved."""

        def reached(state: State) -> bool:
            is_later = state.last_attempt >= attempt and is_stepping(state)
            return is_later and any(by >= attempt for _, by in state.commits)

        self.mark("fault injected")
        self.wait(f"attempt {attempt}", lambda state: state.last_attempt >= attempt)
        self.mark(f"attempt {self.state.last_attempt} decided")
        self.wait(f"a checkpoint of attempt {attempt}", reached)
        self.mark("trains and has saved again")

    def trains_on(self) -> None:
        """Wait until the attempt as it is has saved once more."""
        before = self.state.commits[:1]
        self.wait("one more checkpoint", lambda state: state.commits[:1] > before)

    def ends_with(self) -> ExitCode:
        """Wait for the supervisor's end and return its exit code."""
        assert self._process is not None
        code = ExitCode(self._process.wait(PATIENCE_S))
        self.refresh()
        self.mark(f"supervisor ended with {code.name}")
        return code

    def start_again(self) -> None:
        """Start a run that had ended; its journal is a new one."""
        self.records, self.state = (), State()
        self.start()

    # --- what it looks at ------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the newest attempt in rank order."""
        assert self.state.attempt is not None
        return self.state.attempt.nodes

    @property
    def spare(self) -> str:
        """The one living node without ranks."""
        (spare,) = living(self.state) - set(self.nodes)
        return spare

    def events(self, *kinds: type[Event]) -> list[tuple[Record, Event]]:
        """Return the journal's records of some kinds."""
        return [(record, record.event) for record in self.records if type(record.event) in kinds]

    def starts(self) -> list[StartRanks]:
        """Return all decisions to start ranks, oldest first."""
        made = [
            record.event for record in self.records if isinstance(record.event, ev.DecisionMade)
        ]
        return [d.decision.action for d in made if isinstance(d.decision.action, StartRanks)]

    def jobs(self) -> list[str]:
        """Return the states of all jobs that this run ever had."""
        return [job.state.value for job in jobs_of(self.cluster, f"everstep-{self.name}")]

    def sums(self) -> dict[str, str]:
        """Return the SHA-256 sums of the last checkpoint in the store."""
        store = open_store(StoreConfig(url=f"file://{self.store}"))
        return content_sha256(store, self.name, STEPS)

    def uploader(self, node: str) -> int:
        """Return the pid of a node's uploader on this machine."""
        found = [p.pid for p in processes(self.inits) if p.node == node and is_uploader(p)]
        (pid,) = found
        return pid

    def living_ranks(self, node: str, attempt: int) -> list[Process]:
        """Return the ranks of an attempt that are alive on a node."""
        pids: set[int] = set()
        for _, event in self.events(ev.RanksStarted):
            assert isinstance(event, ev.RanksStarted)
            if (event.node, event.attempt) == (node, attempt):
                pids |= {*event.pids}
        return [p for p in processes({node: self.inits[node]}) if p.inner in pids]

    # --- how it ends -----------------------------------------------------------------------------

    def finish(self, *, jobs: int = 1, lost_steps: int | None = None) -> tuple[Incident, ...]:
        """Let the run end well, check what must hold after every story, and return its incidents.

        Args:
            jobs: How many Slurm jobs the story is about.
            lost_steps: The most that one incident may cost; by default one interval, and what was
                trained while the checkpoint before was on its way to the store.
        """
        self.gate.touch()
        self.wait("the end of the ranks", lambda state: state.outcome is not None)
        self.mark("ranks are done")
        self.join()
        self.mark("run is over")
        assert self.state.outcome is Outcome.FINISHED, self.state.outcome_reason
        self.check(jobs=jobs, lost_steps=lost_steps)
        return self.state.incidents

    def check(self, *, jobs: int = 1, lost_steps: int | None = None) -> None:
        """Check what must hold after every story, also one that did not end well."""
        differences = replay(self.records).differences
        assert not differences, f"the journal replays to something else: {differences}"
        allowed = lost_steps if lost_steps is not None else INTERVAL + self.late_steps()
        for incident in self.state.incidents:
            if incident.resumed_step is not None:
                assert incident.step - incident.resumed_step <= allowed, incident
        self.leaves_nothing()
        assert len(self.jobs()) == jobs, self.jobs()
        self.mark("nothing is left")

    def late_steps(self) -> int:
        """Return how many steps the slowest commit took, from the first copy in memory on."""
        staged: dict[tuple[int, int], float] = {}
        longest = 0.0
        for record, event in self.events(ev.Staged, ev.CheckpointCommitted):
            if isinstance(event, ev.Staged):
                for shard in event.shards:
                    staged.setdefault((shard.step, shard.attempt), record.at)
            elif isinstance(event, ev.CheckpointCommitted) and not self.gate_was_open(record):
                longest = max(
                    longest, record.at - staged.get((event.step, event.attempt), record.at)
                )
        return math.ceil(longest / STEP_S) + 1

    def gate_was_open(self, record: Record) -> bool:
        return self.gate.exists() and record.at > self.gate.stat().st_mtime

    def leaves_nothing(self) -> None:
        """Check that no process and no memory of the run is left, on nodes that have power.

        What is Slurm's own looks a while for nodes that died, and ends by itself.
        """
        self.inits = power(self.cluster)
        eventually("nothing of the run is left", lambda: not self.left())

    def left(self) -> list[str]:
        """Return what is left of the run on this machine and on the nodes."""
        everywhere = processes_of(self.config).values()  # all processes are the machine's as well
        ours = [command for command in everywhere if not is_slurm(command)]
        on_nodes = [f"{p.node}: {p.command}" for p in processes(self.inits)]
        here = [str(path) for path in [memory_of(self.config)] if path.exists()]
        return [*ours, *on_nodes, *here, *memory(self.inits)]

    def close(self) -> None:
        """End the supervisor; the nodes are cleaned up by whoever owns the cluster."""
        if self._process is not None and self._process.poll() is None:
            kill(self._process.pid)
            self._process.wait()


def is_uploader(process: Process) -> bool:
    """Whether this is a node's uploader."""
    return "checkpointing.uploader" in process.command


def living(state: State) -> set[str]:
    """Return the nodes whose agents are there."""
    return {node.name for node in state.nodes.values() if node.alive}


def is_stepping(state: State) -> bool:
    """Whether the newest attempt has finished a step and nothing is wrong with it."""
    attempt = state.attempt
    if attempt is None or not attempt.is_live or attempt.first_trouble is not None:
        return False
    return attempt.first_step_at is not None and attempt.stop_ordered_at is None
