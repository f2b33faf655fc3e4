"""`everstep submit` on a real Slurm: its job may lose node and time."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.core.actions import Outcome
from orchestrator.core.state import State
from orchestrator.exit_codes import ExitCode
from orchestrator.launch.slurm_text import JobFate, SlurmJobState
from orchestrator.supervisor.lease import current_holder
from orchestrator.views.replay import replay
from tests.integration.command_line import everstep
from tests.integration.devclusters import (
    MARKS,
    cluster_of_three,
    eventually,
    make_whole,
    memory_of_nodes,
)
from tests.integration.slurm_nodes import WatchedRun, all_ranks_started
from tests.integration.traces import traces

# Long: Slurm may requeue the supervisor's job once more, and then holds it for two minutes.
pytestmark = [*MARKS, pytest.mark.timeout(400)]

SUPERVISOR = "-supervisor"


class SubmittedRun(WatchedRun):
    """A run whose supervisor is a job."""

    def submit(self) -> str:
        """Submit the supervisor; returns what was said."""
        done = everstep("submit", self.toml, env={**self.cluster.env(), "LEAKED_SECRET": "s3cret"})
        assert done.returncode == ExitCode.OK, done.stderr
        return done.stdout

    @property
    def supervisor(self) -> str:
        """The id of the newest supervisor's job."""
        return self.jobs(SUPERVISOR)[-1].job

    @property
    def supervisor_log(self) -> str:
        return (self.config.run_dir / "supervisor.log").read_text(encoding="utf-8")

    def gives_up_the_lease(self) -> bool:
        """Whether the newest supervisor ended in order: SIGTERM reached it, and it had time."""
        holder = current_holder(self.config.run_dir / "lease")
        return holder is not None and holder.released

    def goes_on_elsewhere(self, *, in_order: bool = False) -> None:
        """Wait for Slurm to queue the job again, spare it the two minutes, and for what follows."""
        job = self.supervisor

        def is_queued_again() -> bool:
            (view,) = (view for view in self.jobs(SUPERVISOR) if view.job == job)
            return view.fate is JobFate.PENDING and view.reason == "BeginTime"

        eventually("the job is queued again", is_queued_again)
        assert self.gives_up_the_lease() is in_order
        self.cluster.slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
        epoch = self.state.epoch
        self.wait("the next supervisor", lambda state: state.epoch == epoch + 1)
        assert self.supervisor == job


Make = Callable[[str], SubmittedRun]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    with cluster_of_three("s", tmp_path_factory.getbasetemp()) as running:
        yield running


@pytest.fixture
def make(tmp_path: Path, cluster: Devcluster) -> Iterator[Make]:
    """Make runs with ranks on node2 and node3, so that the supervisor's job is on node1."""
    runs: list[SubmittedRun] = []

    def make_run(name: str) -> SubmittedRun:
        run = SubmittedRun.write(tmp_path, cluster, name, count=2, exclude="node1")
        runs.append(run)
        return run

    yield make_run
    make_whole(cluster)
    assert not memory_of_nodes(cluster)
    assert not [found for run in runs for found in traces(run.config)]


def is_running(state: State) -> bool:
    return state.epoch == 1 and all_ranks_started(state)


def ended_untouched(run: SubmittedRun) -> None:
    """The run finishes, and nothing was done to its ranks or its allocation."""
    run.until_over()
    assert run.state.outcome is Outcome.FINISHED
    assert not run.state.incidents
    assert len(run.starts()) == 2
    assert [words[:3] for words in run.notes()] == [
        [word, "1", str(rank)] for word in ("end", "start") for rank in range(4)
    ]
    assert not replay(run.records).differences
    assert len(run.jobs()) == 1
    for suffix in ("", SUPERVISOR):
        eventually("the job counts as completed", partial(completed, run, suffix))


def completed(run: SubmittedRun, suffix: str) -> bool:
    return run.jobs(suffix)[-1].state is SlurmJobState.COMPLETED


def test_a_submitted_run_finishes_and_both_jobs_count_as_completed(
    make: Make, tmp_path: Path
) -> None:
    run = make("plain")
    said = run.submit()
    job = run.supervisor
    assert f"submitted job {job} (everstep-plain-supervisor)" in said
    assert f"scancel {job}" in said
    run.wait("all ranks", is_running)
    assert f"job {job} supervises plain already (running node1)" in run.submit()
    status = everstep("status", run.config.run_dir)
    assert "answers" in status.stdout
    assert re.search(r"http://10\.\d+\.\d+\.11:\d+", status.stdout), status.stdout
    ended_untouched(run)
    assert len(run.jobs(SUPERVISOR)) == 1
    assert "finished" in run.supervisor_log
    for name in ("everstep-plain", "everstep-plain-supervisor"):
        names = (tmp_path / f"names-{name}").read_text().split()
        assert "PATH" in names
        assert "LEAKED_SECRET" not in names
    over = everstep("submit", run.toml, env=run.cluster.env())
    assert over.returncode == ExitCode.PRECONDITION
    assert "is finished" in over.stderr


def test_a_supervisor_whose_node_loses_power_goes_on_elsewhere(make: Make) -> None:
    run = make("dark")
    run.submit()
    run.wait("all ranks", is_running)
    run.cluster.do("power-off", "node1")
    run.goes_on_elsewhere()
    assert run.holder.split(":")[0] in ("node2", "node3")
    ended_untouched(run)


def test_a_supervisor_that_is_cut_off_is_deposed_and_ended(make: Make) -> None:
    """It sees the run directory and renews; Slurm does not see it, and starts its job elsewhere.

    What the first believes until then, with neither agents nor Slurm to hear, is not judged here.
    """
    run = make("alone")
    run.submit()
    run.wait("all ranks", is_running)
    run.cluster.do("partition", "node1")
    run.goes_on_elsewhere()
    assert run.holder.split(":")[0] in ("node2", "node3")
    run.cluster.do("heal", "node1")
    eventually("the first is ended", lambda: "supervisor" not in processes_on(run, "node1"))
    assert run.jobs(SUPERVISOR)[-1].fate is JobFate.RUNNING, "the second is not"
    run.until_over()
    assert run.state.outcome is Outcome.FINISHED
    assert run.state.epoch == 2, "the second saw the end"
    assert not replay(run.records).differences
    epochs = run.epochs_as_written()
    assert epochs == sorted(epochs), "the first wrote nothing after the second"


def processes_on(run: SubmittedRun, node: str) -> str:
    return run.cluster.on(node, "ps", "-eo", "args")


def test_a_supervisor_at_its_time_limit_is_started_again(make: Make) -> None:
    run = make("timely")
    run.submit()
    run.wait("all ranks", is_running)
    run.cluster.slurm("scancel", "--batch", "--signal=USR2", run.supervisor)
    run.goes_on_elsewhere(in_order=True)
    assert "time limit is near" in run.supervisor_log
    ended_untouched(run)


@pytest.mark.chaos
def test_slurm_warns_of_the_time_limit_itself(make: Make) -> None:
    run = make("warned")
    run.submit()
    run.wait("all ranks", is_running)
    limit = ("scontrol", "update", f"JobId={run.supervisor}")
    run.cluster.slurm(*limit, "TimeLimit=2")  # Slurm looks at it every 30 s
    eventually("the warning", lambda: "time limit is near" in run.supervisor_log)
    run.cluster.slurm(*limit, "TimeLimit=UNLIMITED")
    run.goes_on_elsewhere(in_order=True)
    ended_untouched(run)


@pytest.mark.chaos
def test_a_preempted_supervisor_is_started_again(make: Make) -> None:
    run = make("urged")
    run.submit()
    run.wait("all ranks", is_running)
    run.cluster.do("preempt", run.supervisor, "--hold", "3")
    run.goes_on_elsewhere(in_order=True)
    ended_untouched(run)


def test_a_supervisor_that_crashes_is_followed_by_another_in_the_same_job(make: Make) -> None:
    run = make("crashed")
    run.submit()
    run.wait("all ranks", is_running)
    node, _, pid = run.holder.partition(":")
    run.cluster.on(node, "kill", "-KILL", pid)
    run.wait("the next supervisor", lambda state: state.epoch == 2)
    assert run.holder.startswith(f"{node}:")
    ended_untouched(run)
    assert "ended with -9; the next in 1 s" in run.supervisor_log


def test_a_cancelled_supervisor_leaves_the_ranks_alone_and_can_be_submitted_again(
    make: Make,
) -> None:
    run = make("cancelled")
    run.submit()
    run.wait("all ranks", is_running)
    first = run.supervisor
    run.cluster.slurm("scancel", first)
    eventually("it is gone", lambda: run.jobs(SUPERVISOR)[-1].fate is JobFate.GONE)
    eventually("it ended in order", run.gives_up_the_lease)
    assert "submitted job" in run.submit()
    assert run.supervisor != first
    run.wait("the next supervisor", lambda state: state.epoch == 2)
    ended_untouched(run)
