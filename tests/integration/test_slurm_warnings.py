"""What Slurm's own signals do to a run: all processes of the step get them, not the agent alone."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.core.events import AgentWarned, Progress, RankExited, ShardUploaded
from orchestrator.core.state import State
from tests.integration.devclusters import (
    MARKS,
    eventually,
    jobs_of,
    make_whole,
    memory_of_nodes,
    shares,
)
from tests.integration.test_slurm_run import SlurmRun, all_ranks_started
from tests.integration.traces import processes_of

pytestmark = [*MARKS, pytest.mark.timeout(150)]

T = TypeVar("T")
JOB = Path(__file__).parents[1] / "data" / "short_saving_job.py"
LEAVE_S = 9.0
NODES = ("node1", "node2", "node3")
OURS = ("short_saving_job", "submitit.core", "checkpointing.uploader", "orchestrator.agent")
TOML = """\
[run]
name = "{name}"

[job]
command = ["python", "{job}", "100000", "0.05"]
workdir = "{folder}"
preload = {preload}

[nodes]
launcher = "slurm"
count = 2
spares = 1
ranks_per_node = 2

[checkpoint]
store = "{store}"
interval_steps = 20
tune = false

[server]
host = "{host}"

[slurm]
partition = "batch"
time_min = 30
options = {{ cpus-per-task = 2 }}

[timeouts]
heartbeat_s = 0.2
agent_lost_s = 4.0
kill_grace_s = 3.0
leave_s = {leave_s}
launch_s = 60.0
"""


class Run(SlurmRun):
    """A run that saves, on nodes that can be looked at."""

    def signal_step(self, signum: str) -> None:
        (job,) = (job for job in jobs_of(self.cluster, f"everstep-{self.name}"))
        self.cluster.slurm("scancel", f"--signal={signum}", job.job)

    def events(self, kind: type[T]) -> list[T]:
        return [record.event for record in self.records if isinstance(record.event, kind)]

    def warned(self, signum: str) -> set[str]:
        """Nodes whose agents told of the signal."""
        return {warned.node for warned in self.events(AgentWarned) if warned.signal == signum}

    def killed(self) -> list[RankExited]:
        """Ranks that ended in another way than by themselves or by their agent."""
        return [end for end in self.events(RankExited) if not end.ours and end.code != 0]

    def step(self) -> int:
        return max((progress.max_step for progress in self.events(Progress)), default=0)

    def processes(self, node: str) -> list[str]:
        """What of the run lives on a node."""
        lines = self.cluster.on(node, "ps", "-wweo", "pid,args").splitlines()
        words = [line.split() for line in lines]
        return [
            " ".join(line)
            for line in words
            if line[1] != "srun" and any(ours in word for ours in OURS for word in line)
        ]

    def agents(self) -> list[str]:
        """Nodes whose agents have not left."""
        return [path.parent.name for path in self.config.run_dir.glob("nodes/*/agent.json")]

    def said(self) -> str:
        """What the ranks printed."""
        logs = (self.config.run_dir / "logs").glob("*/*.log")
        return "\n".join(log.read_text() for log in logs)

    def supervisor(self, signum: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signum)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    options = ["--nodes", "3", "--set", "KillWait=20"]
    shared = shares(tmp_path_factory.getbasetemp())
    with Devcluster(f"w{os.getpid()}", *options, *shared) as running:
        yield running


@pytest.fixture(params=["[]", '["numpy"]'], ids=["exec", "zygote"])
def run(tmp_path: Path, cluster: Devcluster, request: pytest.FixtureRequest) -> Iterator[Run]:
    toml, store = tmp_path / "warned.toml", tmp_path / "store"
    store.mkdir()
    text = TOML.format(
        name=tmp_path.name.replace("_", "-")[:40],  # the cluster remembers the jobs of all tests
        job=JOB,
        folder=tmp_path,
        preload=request.param,
        store=store.as_uri(),
        host=cluster.env()["DEVCLUSTER_ADDRESS"],
        leave_s=LEAVE_S,
    )
    toml.write_text(text, encoding="utf-8")
    run = Run(toml, dict(cluster.env()), lambda _: None)
    run.cluster = cluster
    yield run
    run.close()
    eventually("no job is being submitted", lambda: not submits(run))
    make_whole(cluster)
    assert not memory_of_nodes(cluster)
    assert not [found for node in NODES for found in run.processes(node)]


def submits(run: Run) -> bool:
    """Whether a child that outlived the supervisor has yet to ask for nodes."""
    commands = processes_of(run.config).values()
    return any("sbatch" in line or "orchestrator.launch.submit" in line for line in commands)


def trains(state: State) -> bool:
    return all_ranks_started(state) and state.last_attempt > 0


def test_usr2_is_told_by_every_agent_and_training_goes_on(run: Run) -> None:
    run.start()
    run.wait("all ranks", trains)
    run.wait("steps", lambda _: run.step() > 20)
    run.signal_step("USR2")
    run.wait("every agent's word", lambda _: run.warned("USR2") == set(NODES))
    step = run.step()
    run.wait("further steps", lambda _: run.step() > step + 40)
    assert not run.killed()
    assert all(incident.fault_class == "free" for incident in run.state.incidents)


def test_ranks_outlive_term_and_the_agents_leave_in_time(run: Run) -> None:
    """The supervisor is frozen, so that all that is seen is the agents' doing."""
    run.start()
    run.wait("all ranks", trains)
    run.wait("steps", lambda _: run.step() > 20)
    before = {node: run.processes(node) for node in NODES}
    run.supervisor(signal.SIGSTOP)
    run.signal_step("TERM")
    eventually(
        "every rank notes it", lambda: run.said().count("SIGTERM that the agent did not") == 4
    )
    assert {node: run.processes(node) for node in NODES} == before
    eventually("the agents have left", lambda: not run.agents(), LEAVE_S)
    eventually("the nodes are empty", lambda: not any(run.processes(node) for node in NODES))
    assert not memory_of_nodes(run.cluster)
    run.supervisor(signal.SIGCONT)
    run.wait("the word of all agents", lambda _: run.warned("TERM") == set(NODES))
    assert not run.killed()
    assert [warned.left_s for warned in run.events(AgentWarned)] == [LEAVE_S] * 3


def test_a_supervised_run_loses_no_rank_to_term(run: Run) -> None:
    run.start()
    run.wait("all ranks", trains)
    run.wait("a stored checkpoint", lambda _: bool(run.events(ShardUploaded)))
    run.signal_step("TERM")
    run.wait("every agent's word", lambda _: run.warned("TERM") == set(NODES))
    first = jobs_of(run.cluster, f"everstep-{run.name}")[0].job
    eventually("the first job's agents have left", lambda: not agents_of(run, first))
    run.refresh()
    assert not run.killed()


def agents_of(run: Run, job: str) -> list[str]:
    """Nodes where an agent of this job lives."""
    return [
        node
        for node in NODES
        for line in run.cluster.on(node, "sh", "-c", ENVIRONMENTS).splitlines()
        if line == f"SLURM_JOB_ID={job}"
    ]


ENVIRONMENTS = (
    "for p in $(pgrep -f submitit.core); do tr '\\\\0' '\\n' < /proc/$p/environ; done 2>/dev/null"
    " | grep ^SLURM_JOB_ID= || true"
)
