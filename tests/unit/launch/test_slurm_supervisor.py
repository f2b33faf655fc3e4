"""The supervisor's own job without Slurm: what is asked for, and that it is asked for once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.launch import slurm_submit, slurm_supervisor
from orchestrator.launch.launcher import AllocationSpec
from orchestrator.launch.slurm_commands import SlurmRefused, SlurmUnavailable
from orchestrator.launch.slurm_options import SlurmOptions
from orchestrator.launch.slurm_supervisor import SupervisorSpec, find, render, submit
from orchestrator.launch.slurm_text import JobView, SlurmJobState

FOLDER = Path("/shared/run dir/supervisor")
SPEC = SupervisorSpec(run="r", folder=FOLDER, options=SlurmOptions())


def view(job: str, state: SlurmJobState = SlurmJobState.RUNNING, **changes: Any) -> JobView:
    values: dict[str, Any] = {
        "job": job,
        "state": state,
        "nodes": (),
        "name": SPEC.job_name,
        "comment": SPEC.comment,
        "workdir": str(FOLDER),
        "reason": "",
    }
    return JobView(**{**values, **changes})


class FakeSlurm:
    """Answers to squeue, one after the other; the last one is repeated."""

    def __init__(self, *answers: tuple[JobView, ...]) -> None:
        self.answers = list(answers)

    def jobs_named(self, name: str) -> tuple[JobView, ...]:
        assert name == "everstep-r-supervisor"
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def slurm(monkeypatch: pytest.MonkeyPatch, *answers: tuple[JobView, ...]) -> None:
    monkeypatch.setattr(slurm_supervisor, "jobs_named", FakeSlurm(*answers).jobs_named)
    monkeypatch.setattr(slurm_supervisor, "POLL_S", 0.0)


def spec_in(folder: Path) -> SupervisorSpec:
    return SupervisorSpec(run="r", folder=folder, options=SlurmOptions())


def test_the_job_is_small_and_comes_back_and_is_rendered_without_slurm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    options = SlurmOptions(
        partition="cpu",
        account="ml",
        qos="long",
        reservation="week 7",
        time_min=60,
        options={"mem": "2048M"},
        prologue=("module load x",),
    )
    lines = render(SupervisorSpec(run="r", folder=FOLDER, options=options)).splitlines()
    for line in (
        "--nodes=1",
        "--ntasks-per-node=1",
        "--requeue",
        "--open-mode=append",
        "--job-name=everstep-r-supervisor",
        "--comment=r/supervisor",
        f"--chdir='{FOLDER}'",
        "--export=ALL",
        "--partition=cpu",
        "--account=ml",
        "--qos=long",
        "--reservation='week 7'",
        "--time=60",
        "--mem=2048M",
        "--signal=B:USR2@120",
    ):
        assert f"#SBATCH {line}" in lines
    assert "module load x" in lines
    assert not [line for line in lines if "no-requeue" in line or "gpus" in line]
    assert lines[-1].startswith("exec ")
    assert not [line for line in lines if "srun" in line]
    assert lines[-1].endswith(f" -P -u -m submitit.core._submit '{FOLDER}'")


def test_what_the_site_decides_is_left_out() -> None:
    text = render(SPEC)
    for word in ("--time", "--wckey", "--partition", "--account", "--qos", "--reservation"):
        assert word not in text


def test_no_allocation_passes_for_the_job_of_a_supervisor() -> None:
    """A run may be called like another run's supervisor; comment and folder differ."""
    run_dir = Path("/runs/r-supervisor")
    other = AllocationSpec(
        key="r-supervisor/0/launch/1",
        name="r-supervisor",
        nodes=1,
        gpus_per_node=0,
        run_dir=run_dir,
    )
    script = slurm_submit.render(other, SlurmOptions())
    assert f"--job-name={SPEC.job_name}" in script
    assert f"--comment={SPEC.comment}\n" not in script


def test_only_a_living_job_of_this_very_run_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(
        monkeypatch,
        (
            view("1", SlurmJobState.COMPLETED),
            view("2", comment="r-supervisor/0/launch/1"),
            view("3", workdir="/elsewhere"),
            view("4", SlurmJobState.PENDING),
        ),
    )
    found = find(SPEC)
    assert found is not None
    assert found.job == "4"


def test_a_job_that_completes_is_waited_for_as_it_may_be_queued_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    completing = (view("1", SlurmJobState.COMPLETING),)
    slurm(monkeypatch, completing, completing, (view("1", SlurmJobState.PENDING),))
    found = find(SPEC)
    assert found is not None
    slurm(monkeypatch, completing, (view("1", SlurmJobState.CANCELLED),))
    assert find(SPEC) is None
    monkeypatch.setattr(slurm_supervisor, "SETTLE_S", 0.0)
    slurm(monkeypatch, completing)
    with pytest.raises(SlurmUnavailable, match="job 1 is still completing"):
        find(SPEC)


def test_a_job_that_is_there_is_not_made_again_and_its_file_not_touched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = spec_in(tmp_path)
    slurm(monkeypatch, (view("4", workdir=str(tmp_path)),))
    monkeypatch.setattr(slurm_supervisor, "_submit_in_child", None)
    found, job = submit(spec, lambda: pytest.fail("the living job's file was replaced"))
    assert found is not None
    assert (found.job, job) == ("4", "4")


@pytest.mark.parametrize("error", [SlurmUnavailable("timed out"), SlurmRefused("no such qos")])
def test_a_job_that_slurm_took_without_saying_so_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    spec = spec_in(tmp_path)
    prepared: list[int] = []

    def fails(*_: object) -> str:
        assert prepared
        raise error

    monkeypatch.setattr(slurm_supervisor, "_submit_in_child", fails)
    slurm(monkeypatch, (), (view("5", workdir=str(tmp_path)),))
    assert submit(spec, lambda: prepared.append(1)) == (None, "5")
    slurm(monkeypatch, ())
    with pytest.raises(type(error), match=str(error)):
        submit(spec, lambda: None)


def fake_sbatch(folder: Path, body: str) -> None:
    path = folder / "sbatch"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_the_child_submits_with_the_allowed_part_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_sbatch(tmp_path, f"env > {tmp_path}/seen; echo Submitted batch job 12")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("LEAKED_SECRET", "s3cret")
    monkeypatch.setenv("SLURM_CPU_BIND", "cores")
    monkeypatch.setenv("SLURM_CONF", "/etc/there")
    slurm(monkeypatch, ())
    assert submit(spec_in(tmp_path), lambda: None) == (None, "12")
    seen = (tmp_path / "seen").read_text()
    assert "s3cret" not in seen
    assert "SLURM_CPU_BIND" not in seen
    assert "SLURM_CONF=/etc/there" in seen
    assert json.loads((tmp_path / "job.json").read_text()) == {"job": "12"}
    assert (tmp_path / "12_submitted.pkl").exists()


def test_an_excluded_node_that_the_cluster_has_no_more_does_not_stop_the_submission(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Slurm refuses a request that names a node which it does not know."""
    fake_sbatch(tmp_path, f"cat $1 > {tmp_path}/seen; echo Submitted batch job 12")
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'node2|idle|none'\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm(monkeypatch, ())
    spec = replace(spec_in(tmp_path), exclude=("node2", "node9"))
    assert "#SBATCH --exclude=node2,node9" in render(spec).splitlines()
    assert submit(spec, lambda: None) == (None, "12")
    assert "#SBATCH --exclude=node2" in (tmp_path / "seen").read_text().splitlines()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("sbatch: error: Batch job submission failed: Invalid qos specification", SlurmRefused),
        ("sbatch: error: Socket timed out on send/recv operation", SlurmUnavailable),
    ],
)
def test_why_there_is_no_job_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, error: type[Exception]
) -> None:
    fake_sbatch(tmp_path, f"echo '{said}' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm(monkeypatch, ())
    with pytest.raises(error, match=said.rpartition(": ")[2]):
        submit(spec_in(tmp_path), lambda: None)
