"""`everstep run` on a real Slurm: it finishes, loses a node, loses its supervisor."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.demo.processes import kill
from deploy.demo.run import Run
from deploy.devcluster.client import Devcluster
from orchestrator.core.actions import Outcome
from orchestrator.core.events import RanksStarted
from orchestrator.core.state import State
from orchestrator.launch.slurm_text import SlurmJobState
from orchestrator.views.replay import replay
from tests.integration.devclusters import (
    MARKS,
    cluster_of_three,
    eventually,
    jobs_of,
    make_whole,
    memory_of_nodes,
)
from tests.integration.traces import traces

pytestmark = [*MARKS, pytest.mark.timeout(150)]

DATA = Path(__file__).parents[1] / "data"
TOML = """\
[run]
name = "{name}"

[job]
command = ["python", "{script}", "{seconds}", "{gate}"]
workdir = "{workdir}"
preload = []

[nodes]
launcher = "slurm"
count = 2
spares = 1
ranks_per_node = 2
gpus_per_node = 1

[server]
host = "{host}"

[slurm]
partition = "batch"
time_min = 30
options = {{ cpus-per-task = 2 }}

[timeouts]
heartbeat_s = 0.2
agent_lost_s = 4.0
kill_grace_s = 1.0
leave_s = 2.0
launch_s = 60.0
"""


class SlurmRun(Run):
    """A run whose processes are on the cluster's nodes."""

    gate: Path
    cluster: Devcluster

    @property
    def jobs(self) -> list[SlurmJobState]:
        return [job.state for job in jobs_of(self.cluster, f"everstep-{self.name}")]

    def open_gate(self) -> None:
        """Let the ranks end."""
        self.gate.touch()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            kill(self._process.pid)
            self._process.wait()


MakeRun = Callable[[str], SlurmRun]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    with cluster_of_three("r", tmp_path_factory.getbasetemp()) as running:
        yield running


@pytest.fixture
def make(tmp_path: Path, cluster: Devcluster) -> Iterator[MakeRun]:
    runs: list[SlurmRun] = []

    def make_run(name: str) -> SlurmRun:
        toml = tmp_path / f"{name}.toml"
        text = TOML.format(
            name=name,
            script=DATA / "short_job.py",
            seconds=90,
            gate=tmp_path / "gate",
            workdir=tmp_path,
            host=cluster.env()["DEVCLUSTER_ADDRESS"],
        )
        toml.write_text(text, encoding="utf-8")
        run = SlurmRun(toml, dict(cluster.env()), lambda _: None)
        run.gate, run.cluster = tmp_path / "gate", cluster
        runs.append(run)
        return run

    yield make_run
    for run in runs:
        run.close()
    make_whole(cluster)
    assert not memory_of_nodes(cluster)
    assert not [found for run in runs for found in traces(run.config)]


def all_ranks_started(state: State) -> bool:
    attempt = state.attempt
    return attempt is not None and attempt.started_nodes >= set(attempt.nodes)


def ended_well(run: SlurmRun) -> None:
    run.join()
    assert run.state.outcome is Outcome.FINISHED
    assert not replay(run.records).differences


def completed_once(run: SlurmRun) -> None:
    """There was one job, and in the site's books it is a good one."""
    eventually("the job is over", lambda: SlurmJobState.COMPLETING not in run.jobs)
    assert run.jobs == [SlurmJobState.COMPLETED]


def test_a_run_finishes_and_its_job_counts_as_completed(make: MakeRun) -> None:
    run = make("plain")
    run.start()
    run.wait("all ranks", all_ranks_started)
    assert run.state.attempt is not None
    first, second = run.state.attempt.nodes
    notes = run.config.run_dir / "output" / "notes"
    run.open_gate()
    ended_well(run)
    assert not run.state.incidents
    assert sorted(line.split()[:3] for line in notes.read_text().splitlines()) == [
        [word, "1", str(rank)] for word in ("end", "start") for rank in range(4)
    ]
    assert {first, second} < {"node1", "node2", "node3"}
    completed_once(run)


@pytest.mark.parametrize("place", [0, 1], ids=["batch host and rendezvous", "worker"])
def test_a_node_without_power_is_replaced_by_the_spare(
    make: MakeRun, cluster: Devcluster, place: int
) -> None:
    run = make(f"lost{place}")
    run.start()
    run.wait("all ranks", all_ranks_started)
    assert run.state.attempt is not None
    nodes = run.state.attempt.nodes
    (spare,) = {"node1", "node2", "node3"} - set(nodes)
    cluster.do("power-off", nodes[place])
    run.wait("the next attempt", lambda state: state.last_attempt == 2 and all_ranks_started(state))
    assert run.state.attempt.nodes == tuple(
        spare if n == place else node for n, node in enumerate(nodes)
    )
    started = [r.at for r in run.records if isinstance(r.event, RanksStarted)]
    print(f"from the last start to the next: {started[-1] - started[1]:.1f} s")
    run.open_gate()
    ended_well(run)
    (incident,) = run.state.incidents
    assert (incident.fault, incident.node) == ("node_lost", nodes[place])
    assert len(run.jobs) == 1


def test_a_killed_supervisor_is_replaced_and_the_allocation_kept(make: MakeRun) -> None:
    run = make("deposed")
    run.start()
    run.wait("all ranks", all_ranks_started)
    pids = run.rank_pids()
    run.kill_supervisor()
    run.start()
    run.wait("the next supervisor", lambda state: state.epoch == 2)
    run.open_gate()
    ended_well(run)
    assert not run.state.incidents
    assert run.rank_pids() == pids
    completed_once(run)


def test_a_supervisor_killed_while_it_submits_makes_no_second_job(make: MakeRun) -> None:
    run = make("hasty")
    run.start()
    run.wait("the decision to launch", lambda state: bool(state.pending))
    run.kill_supervisor()
    run.start()
    run.wait("all ranks", all_ranks_started)
    run.open_gate()
    ended_well(run)
    completed_once(run)
