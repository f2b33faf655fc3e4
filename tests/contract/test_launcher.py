"""What every launcher must do: on this machine, on a real Slurm, and the fake one in memory."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from deploy.devcluster.client import Devcluster
from monitors.observations import Ok, Unknown
from orchestrator.config import RunConfig, freeze, parse
from orchestrator.core.events import Ending
from orchestrator.launch.launcher import Allocation, AllocationSpec, Launcher, LaunchRefusedError
from orchestrator.launch.local import LocalLauncher
from orchestrator.launch.slurm import SlurmLauncher
from orchestrator.launch.slurm_look import manned_by
from orchestrator.launch.slurm_options import SlurmOptions
from tests.contract.fake_launcher import FakeLauncher
from tests.integration.devclusters import (
    MARKS,
    cluster_of_three,
    jobs_of,
    make_whole,
    memory_of_nodes,
)
from tests.integration.traces import processes_of, traces

PATIENCE_S = 60.0


class Bench(Protocol):
    """A launcher, and what a test does to its world."""

    launcher: Launcher
    run_dir: Path

    def kill_node(self, node: str) -> None: ...

    def allocations(self) -> int: ...

    def nodes_of(self, job: str) -> tuple[str, ...]: ...

    def all_there(self, allocation: Allocation) -> bool: ...


def names_in(launcher: Launcher, job: str) -> tuple[str, ...]:
    """The nodes that a launcher of this machine names itself."""
    seen = launcher.observe(job)
    assert isinstance(seen, Ok)
    return tuple(seen.value.nodes)


class FakeBench:
    def __init__(self, folder: Path) -> None:
        self.run_dir = folder
        self.launcher = FakeLauncher()
        self.kill_node = self.launcher.kill_node
        self.allocations = self.launcher.allocations

    def nodes_of(self, job: str) -> tuple[str, ...]:
        return names_in(self.launcher, job)

    def all_there(self, allocation: Allocation) -> bool:
        return allocation.running and bool(allocation.nodes) and all(allocation.nodes.values())


class LocalBench:
    def __init__(self, folder: Path) -> None:
        self.config: RunConfig = parse(
            {
                "run": {"name": "launched", "dir": str(folder)},
                "job": {"command": ["true"], "preload": []},
                "nodes": {"count": 2},
            },
            "the test",
        )
        self.run_dir = self.config.run_dir
        self.run_dir.mkdir()
        freeze(self.config, self.run_dir / "run.json")
        self.launcher = LocalLauncher(self.run_dir, self.config.memory_root)

    def nodes_of(self, job: str) -> tuple[str, ...]:
        return names_in(self.launcher, job)

    def all_there(self, allocation: Allocation) -> bool:
        wanted = json.loads((self.run_dir / "submitit" / allocation.job / "nodes.json").read_text())
        return allocation.running and allocation.nodes == dict.fromkeys(wanted, True)

    def pid(self, node: str) -> int:
        text = (self.run_dir / "nodes" / node / "agent.json").read_text()
        return int(json.loads(text)["pid"])

    def kill_node(self, node: str) -> None:
        os.kill(self.pid(node), signal.SIGKILL)

    def allocations(self) -> int:
        return len(list((self.run_dir / "submitit").glob("*/*_submitted.pkl")))


class SlurmBench:
    def __init__(self, folder: Path, cluster: Devcluster) -> None:
        address = cluster.env()["DEVCLUSTER_ADDRESS"]
        self.cluster = cluster
        self.config: RunConfig = parse(
            {
                "run": {"name": "launched", "dir": str(folder)},
                "job": {"command": ["true"], "preload": []},
                "nodes": {"count": 2, "launcher": "slurm"},
                "server": {"host": address},
                "timeouts": {"kill_grace_s": 1.0, "leave_s": 2.0},
            },
            "the test",
        )
        self.run_dir = self.config.run_dir
        self.run_dir.mkdir()
        freeze(self.config, self.run_dir / "run.json")
        # Nobody listens there; the agents wait.
        (self.run_dir / "supervisor.json").write_text(json.dumps({"url": f"http://{address}:9"}))
        self.launcher = self.launcher_for(SlurmOptions())

    def launcher_for(self, options: SlurmOptions) -> SlurmLauncher:
        return SlurmLauncher(self.run_dir, options, look_every_s=0.3)

    def kill_node(self, node: str) -> None:
        self.cluster.do("power-off", node)

    def allocations(self) -> int:
        jobs = jobs_of(self.cluster, "everstep-launched")
        return sum(Path(job.workdir).parent == self.run_dir / "submitit" for job in jobs)

    def nodes_of(self, job: str) -> tuple[str, ...]:
        (found,) = (view for view in jobs_of(self.cluster, "everstep-launched") if view.job == job)
        return found.nodes

    def all_there(self, allocation: Allocation) -> bool:
        nodes = self.nodes_of(allocation.job)
        manned = manned_by(self.run_dir, allocation.job)
        return allocation.running and bool(nodes) and sorted(nodes) == manned


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    with cluster_of_three("l", tmp_path_factory.getbasetemp()) as running:
        yield running


@pytest.fixture
def slurm(
    tmp_path: Path, cluster: Devcluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmBench]:
    monkeypatch.setenv("SLURM_CONF", cluster.env()["SLURM_CONF"])
    bench = SlurmBench(tmp_path, cluster)
    yield bench
    make_whole(cluster)
    assert not traces(bench.config)
    assert not memory_of_nodes(cluster)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalBench]:
    bench = LocalBench(tmp_path)
    yield bench
    bench.launcher.cancel("")
    assert not traces(bench.config)


@pytest.fixture(
    params=[
        "fake",
        pytest.param("local", marks=pytest.mark.slow),
        pytest.param("slurm", marks=MARKS),
    ]
)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    if request.param == "fake":
        return FakeBench(tmp_path)
    made: Bench = request.getfixturevalue(request.param)
    return made


def spec(
    bench: Bench, number: int = 1, nodes: int = 2, exclude: tuple[str, ...] = ()
) -> AllocationSpec:
    return AllocationSpec(
        key=f"launched/0/launch/{number}",
        name="launched",
        nodes=nodes,
        gpus_per_node=0,
        run_dir=bench.run_dir,
        exclude=exclude,
    )


def seen(
    bench: Bench, job: str, what: Callable[[Allocation], bool], patience_s: float = PATIENCE_S
) -> Allocation:
    """Observe until something holds."""
    deadline = time.monotonic() + patience_s
    while True:
        observation = bench.launcher.observe(job)
        assert isinstance(observation, Ok), observation
        if what(observation.value):
            return observation.value
        assert time.monotonic() < deadline, observation
        time.sleep(0.05)


def test_an_allocation_runs_with_all_its_nodes(bench: Bench) -> None:
    job = bench.launcher.submit(spec(bench))
    assert job
    there = seen(bench, job, bench.all_there)
    assert there.job == job
    assert (there.held, there.leaving, there.ending) == (False, {}, None)
    assert len(bench.nodes_of(job)) == 2


def test_the_same_key_is_the_same_allocation(bench: Bench) -> None:
    first = bench.launcher.submit(spec(bench))
    assert bench.launcher.submit(spec(bench)) == first
    seen(bench, first, bench.all_there)
    assert bench.launcher.submit(spec(bench)) == first
    assert bench.allocations() == 1


def test_a_killed_node_is_seen_and_ends_no_other(bench: Bench) -> None:
    job = bench.launcher.submit(spec(bench))
    seen(bench, job, bench.all_there)
    first, second = bench.nodes_of(job)
    bench.kill_node(first)
    left = seen(bench, job, lambda allocation: allocation.nodes.get(first) is False)
    assert left.running
    assert left.nodes.get(second, True)


def test_a_cancelled_allocation_goes_and_its_nodes_with_it(bench: Bench) -> None:
    job = bench.launcher.submit(spec(bench))
    seen(bench, job, bench.all_there)
    bench.launcher.cancel(job)
    bench.launcher.cancel(job)
    gone = seen(bench, job, has_ended)
    assert not any(gone.nodes.values())
    bench.launcher.cancel(job)


def two_of_one_node(bench: Bench) -> tuple[str, str]:
    """Two allocations of one run; the second one must not get what the first one has."""
    first = bench.launcher.submit(spec(bench, 1, nodes=1))
    seen(bench, first, bench.all_there)
    exclude = bench.nodes_of(first)
    second = bench.launcher.submit(spec(bench, 2, nodes=1, exclude=exclude))
    seen(bench, second, bench.all_there)
    return first, second


def has_ended(allocation: Allocation) -> bool:
    return not allocation.running and allocation.ending not in (None, Ending.UNKNOWN)


def test_a_new_key_is_a_new_allocation(bench: Bench) -> None:
    first = bench.launcher.submit(spec(bench))
    seen(bench, first, bench.all_there)
    bench.launcher.cancel(first)
    seen(bench, first, lambda allocation: not allocation.running)
    second = bench.launcher.submit(spec(bench, 2))
    seen(bench, second, bench.all_there)
    assert second != first
    assert bench.allocations() == 2


def test_two_keys_are_two_allocations_and_what_is_done_to_one_leaves_the_other(
    bench: Bench,
) -> None:
    first, second = two_of_one_node(bench)
    ours, others = bench.nodes_of(first), bench.nodes_of(second)
    assert not set(ours) & set(others)
    assert bench.launcher.submit(spec(bench, 1, nodes=1)) == first
    assert bench.launcher.submit(spec(bench, 2, nodes=1)) == second
    assert bench.nodes_of(second) == others
    bench.launcher.cancel(first)
    seen(bench, first, has_ended)
    there = seen(bench, second, bench.all_there)
    assert not set(there.nodes) & set(ours)
    assert bench.allocations() == 2


def test_a_node_that_one_allocation_loses_is_no_loss_of_another(bench: Bench) -> None:
    first, second = two_of_one_node(bench)
    (lost,) = bench.nodes_of(first)
    bench.kill_node(lost)
    seen(bench, first, lambda a: not a.running or a.nodes.get(lost) is False)
    assert lost not in seen(bench, second, bench.all_there).nodes


def test_nodes_that_are_excluded_are_not_given(bench: Bench) -> None:
    job = bench.launcher.submit(spec(bench, exclude=("node1",)))
    seen(bench, job, bench.all_there)
    assert "node1" not in bench.nodes_of(job)


def test_what_is_not_held_is_not_released(bench: Bench) -> None:
    job = bench.launcher.submit(spec(bench))
    seen(bench, job, bench.all_there)
    for each in (job, "999999"):
        with pytest.raises(LaunchRefusedError, match="is not held"):
            bench.launcher.unhold(each, ("node1",))
    assert seen(bench, job, bench.all_there).running


def test_all_allocations_are_given_back_at_once(bench: Bench) -> None:
    jobs = two_of_one_node(bench)
    bench.launcher.cancel("")
    for job in jobs:
        seen(bench, job, has_ended)


def test_what_was_never_submitted_does_not_run_and_may_be_cancelled(bench: Bench) -> None:
    observation = bench.launcher.observe("999999")
    assert isinstance(observation, Ok)
    assert not observation.value.running
    assert not observation.value.nodes
    assert observation.value.ending is Ending.UNKNOWN
    bench.launcher.cancel("999999")


@pytest.mark.slow
def test_a_submitter_that_died_before_it_noted_the_job_makes_no_second_agent(
    local: LocalBench,
) -> None:
    first = local.launcher.submit(spec(local))
    seen(local, first, local.all_there)
    before = {node: local.pid(node) for node in ("node0", "node1")}
    (local.run_dir / "submitit" / first / "job.json").unlink()
    assert local.launcher.submit(spec(local)) == first
    log = local.run_dir / "nodes" / "node1" / "agent.log"
    deadline = time.monotonic() + PATIENCE_S
    while "already has an agent" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {node: local.pid(node) for node in ("node0", "node1")} == before
    assert seen(local, first, local.all_there)
    local.launcher.cancel(first)
    seen(local, first, lambda allocation: not allocation.running)


@pytest.mark.slow
def test_an_agent_that_was_killed_leaves_its_memory_to_the_last_one(local: LocalBench) -> None:
    job = local.launcher.submit(spec(local))
    seen(local, job, local.all_there)
    local.kill_node("node1")
    seen(local, job, lambda allocation: allocation.nodes.get("node1") is False)
    local.launcher.cancel(job)
    assert not traces(local.config)


def test_a_refusal_of_the_local_launcher_names_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalBench(tmp_path)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(LaunchRefusedError, match=r"submitting failed; see .*controller\.log"):
        local.launcher.submit(spec(local))
    assert not processes_of(local.config)


def note_agent(local: LocalBench, text: str) -> None:
    for path, content in (("nodes/node0/agent.json", text), ("submitit/1/nodes.json", '["node0"]')):
        (local.run_dir / path).parent.mkdir(parents=True)
        (local.run_dir / path).write_text(content)


@pytest.mark.parametrize("text", ["{", '{"pid": 1}', "[]", '{"pid": "x", "started": 1}'])
def test_what_cannot_be_read_is_unknown_and_not_gone(tmp_path: Path, text: str) -> None:
    local = LocalBench(tmp_path)
    note_agent(local, text)
    assert isinstance(local.launcher.observe("1"), Unknown)
    local.launcher.cancel("1")


def test_a_later_process_with_the_same_pid_is_not_taken_for_the_agent(tmp_path: Path) -> None:
    local = LocalBench(tmp_path)
    note_agent(local, json.dumps({"pid": os.getpid(), "started": 1}))
    observation = local.launcher.observe("1")
    assert isinstance(observation, Ok)
    assert observation.value.nodes == {"node0": False}
    local.launcher.cancel("1")  # and this process goes on
