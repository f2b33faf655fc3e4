"""What is Slurm's own in its launcher, on a real Slurm: lost answers, refusals, the environment."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.devcluster.client import Devcluster
from monitors.observations import Ok, Unknown
from orchestrator.core.events import Ending
from orchestrator.launch import slurm as launcher_module
from orchestrator.launch import slurm_commands
from orchestrator.launch.folders import folder_of
from orchestrator.launch.launcher import LaunchRefusedError
from orchestrator.launch.slurm_options import SlurmOptions
from orchestrator.launch.slurm_submit import render
from tests.contract.test_launcher import SlurmBench, has_ended, seen, spec, two_of_one_node
from tests.integration.devclusters import MARKS, cluster_of_three, eventually, make_whole
from tests.integration.traces import processes_of, traces

pytestmark = MARKS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    with cluster_of_three("m", tmp_path_factory.getbasetemp()) as running:
        yield running


@pytest.fixture
def bench(
    tmp_path: Path, cluster: Devcluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmBench]:
    monkeypatch.setenv("SLURM_CONF", cluster.env()["SLURM_CONF"])
    made = SlurmBench(tmp_path, cluster)
    yield made
    make_whole(cluster)
    assert not traces(made.config)


def hide_sbatch(bench: SlurmBench, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a script in the place of sbatch; `{sbatch}` in it is the real one."""
    folder = bench.run_dir.parent / "bin"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text("#!/bin/sh\n" + script.format(sbatch=shutil.which("sbatch")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_job_that_was_accepted_without_an_answer_is_found(
    bench: SlurmBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    hide_sbatch(bench, monkeypatch, f'{{sbatch}} "$@" > /dev/null; echo "{said}" >&2; exit 1')
    job = bench.launcher.submit(spec(bench))
    assert seen(bench, job, bench.all_there).job == job
    assert bench.allocations() == 1


def test_a_submission_that_hangs_after_it_was_accepted_is_found(
    bench: SlurmBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "SUBMIT_TIMEOUT_S", 5.0)
    hide_sbatch(bench, monkeypatch, '{sbatch} "$@" > /dev/null; sleep 600')
    job = bench.launcher.submit(spec(bench))
    assert seen(bench, job, bench.all_there).job == job
    assert bench.allocations() == 1
    assert not [c for c in processes_of(bench.config).values() if c.startswith("/bin/sh")]


def test_a_job_that_nobody_noted_is_found(bench: SlurmBench) -> None:
    job = bench.launcher.submit(spec(bench))
    seen(bench, job, bench.all_there)
    (folder_of(spec(bench)) / "job.json").unlink()
    assert bench.launcher.submit(spec(bench)) == job
    assert bench.allocations() == 1


def test_what_is_rendered_is_what_was_submitted(bench: SlurmBench) -> None:
    options = SlurmOptions(
        partition="batch",
        exclude="node[3]",
        time_min=30,
        warn_s=45,
        options={"cpus-per-task": 2, "exclusive": True},
        prologue=("export A='a b'",),
    )
    wanted = spec(bench, exclude=("node2",), nodes=1)
    shown = render(wanted, options)
    launcher = bench.launcher_for(options)
    job = launcher.submit(wanted)
    assert (folder_of(wanted) / f"{job}_submission.sh").read_text() == shown
    told = bench.cluster.slurm("scontrol", "write", "batch_script", job, "-")
    assert told.rstrip("\n") == shown.rstrip("\n")
    seen(bench, job, bench.all_there)
    assert bench.nodes_of(job) == ("node1",)


def test_a_drained_node_is_seen_with_the_reason_until_it_is_taken_back(bench: SlurmBench) -> None:
    first, second = two_of_one_node(bench)
    (node,) = bench.nodes_of(first)
    bench.cluster.do("drain", node, "--reason", "rack 7: pump")
    told = seen(bench, first, lambda allocation: bool(allocation.leaving))
    assert told.leaving == {node: "drained: rack 7: pump"}
    assert told.running
    assert not told.nodes
    assert seen(bench, second, bench.all_there).leaving == {}
    bench.cluster.do("undrain", node)
    seen(bench, first, lambda allocation: not allocation.leaving)


def test_a_maintenance_that_begins_soon_is_seen(bench: SlurmBench) -> None:
    job = bench.launcher.submit(spec(bench, nodes=1))
    seen(bench, job, bench.all_there)
    (node,) = bench.nodes_of(job)
    words = ("Duration=60", f"Nodes={node}", "Flags=MAINT,IGNORE_JOBS", "User=root")
    create = ("scontrol", "create", "reservation", *words)
    bench.cluster.slurm(*create, "ReservationName=far", "StartTime=now+2hours")
    try:
        launcher = bench.launcher_for(SlurmOptions())
        observation = launcher.observe(job)
        assert isinstance(observation, Ok)
        assert observation.value.leaving == {}
        bench.cluster.slurm(*create, "ReservationName=soon", "StartTime=now+20minutes")
        observation = bench.launcher_for(SlurmOptions()).observe(job)
        assert isinstance(observation, Ok)
        assert observation.value.leaving == {node: "reserved for maintenance (soon)"}
        bench.cluster.slurm("scontrol", "delete", "ReservationName=soon")
    finally:
        bench.cluster.slurm("scontrol", "delete", "ReservationName=far")


def test_a_persons_scancel_is_told_apart(bench: SlurmBench) -> None:
    job = bench.launcher.submit(spec(bench))
    seen(bench, job, bench.all_there)
    bench.cluster.slurm("scancel", job)
    gone = bench.launcher.observe(job, fresh=True)
    assert isinstance(gone, Ok)
    assert not gone.value.running
    assert seen(bench, job, has_ended).ending is Ending.CANCELLED


def test_a_preemption_is_told_apart_although_agents_leave_before_it(bench: SlurmBench) -> None:
    job = bench.launcher.submit(spec(bench, nodes=1))
    seen(bench, job, bench.all_there)
    bench.cluster.do("preempt", job, "--hold", "1")
    assert seen(bench, job, has_ended).ending is Ending.PREEMPTED


def test_a_refusal_has_slurms_reason_in_one_line(bench: SlurmBench) -> None:
    launcher = bench.launcher_for(SlurmOptions(partition="nowhere"))
    with pytest.raises(LaunchRefusedError, match="Invalid partition name") as caught:
        launcher.submit(spec(bench))
    assert "\n" not in str(caught.value)
    assert bench.allocations() == 0


def test_a_job_that_waits_says_for_what(bench: SlurmBench) -> None:
    launcher = bench.launcher_for(SlurmOptions(options={"begin": "now+1hour"}))
    job = launcher.submit(spec(bench))
    waiting = seen(bench, job, lambda allocation: "," in allocation.queued)
    assert waiting.running
    assert waiting.queued.startswith("pending, ")
    launcher.cancel(job)
    assert not seen(bench, job, lambda allocation: not allocation.running).queued


def test_a_controller_that_is_away_is_unknown_and_ends_nothing(
    bench: SlurmBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench.launcher.submit(spec(bench))
    seen(bench, job, bench.all_there)
    monkeypatch.setattr(slurm_commands, "COMMAND_TIMEOUT_S", 1.0)
    bench.cluster.do("stop-slurmctld")
    try:
        assert isinstance(bench.launcher_for(SlurmOptions()).observe(job), Unknown)
    finally:
        bench.cluster.do("start-slurmctld")
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_CONF", bench.cluster.env()["SLURM_CONF"])
    eventually(
        "Slurm is back",
        lambda: isinstance(bench.launcher_for(SlurmOptions()).observe(job), Ok),
    )
    assert seen(bench, job, bench.all_there).running


def test_agents_get_what_is_allowed_and_what_the_prologue_sets(
    bench: SlurmBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPU_BIND", "map_cpu:0")
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("MY_SECRET", "hidden")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    options = SlurmOptions(
        export=("NCCL_*",),
        prologue=("export FROM_PROLOGUE='a b'",),
        options={"cpus-per-task": 2, "exclusive": True},
    )
    launcher = bench.launcher_for(options)
    job = launcher.submit(spec(bench))
    seen(bench, job, bench.all_there)
    agents = [
        pid
        for pid, command in processes_of(bench.config).items()
        if "submitit.core._submit" in command and "srun" not in command
    ]
    assert agents
    for pid in agents:
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        values = dict(line.partition("=")[::2] for line in environ if line)
        assert values["FROM_PROLOGUE"] == "a b"
        assert values["NCCL_DEBUG"] == "INFO"
        assert values["SLURM_CONF"]
        assert "MY_SECRET" not in values
        assert values.get("SLURM_CPU_BIND") != "map_cpu:0"
