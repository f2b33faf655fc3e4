"""`everstep submit` and `check --render` without Slurm."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli, submission
from orchestrator.app import read
from orchestrator.config import RunConfig, freeze, load, thaw
from orchestrator.core.actions import Outcome
from orchestrator.errors import ConfigError, PreconditionError
from orchestrator.launch import slurm_supervisor
from orchestrator.launch.slurm_commands import SlurmRefused, SlurmUnavailable
from orchestrator.launch.slurm_supervisor import FROZEN, SupervisorSpec
from orchestrator.launch.slurm_text import JobView, SlurmJobState
from orchestrator.supervisor.lease import Lease

TOML = """\
[run]
name = "r"
[job]
command = ["true"]
[nodes]
launcher = "slurm"
count = 2
spares = 1
[slurm]
partition = "gpu"
export = ["NCCL_*"]
"""


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file, on a machine where nothing needs to be there."""
    monkeypatch.setattr(submission, "preflight", lambda _: None)
    monkeypatch.setattr(submission, "with_address", lambda config: config)
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


class FakeSlurm:
    """Takes the job, has it already, or fails."""

    def __init__(self, found: JobView | None = None, error: Exception | None = None) -> None:
        self.found, self.error = found, error
        self.spec: SupervisorSpec | None = None

    def submit(self, spec: SupervisorSpec, prepare: Any) -> tuple[JobView | None, str]:
        self.spec = spec
        if self.error is not None:
            raise self.error
        if self.found is not None:
            return self.found, self.found.job
        prepare()
        return None, "7"


def slurm(monkeypatch: pytest.MonkeyPatch, **values: Any) -> FakeSlurm:
    fake = FakeSlurm(**values)
    monkeypatch.setattr(slurm_supervisor, "submit", fake.submit)
    return fake


def test_the_job_gets_the_run_file_as_it_is_now(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = slurm(monkeypatch)
    done = submission.submit(toml)
    toml.write_text("broken")
    assert (done.job, done.found, done.waits_for) == ("7", "", "")
    assert done.run_dir == toml.parent / "runs" / "r"
    assert fake.spec is not None
    assert fake.spec.folder == done.run_dir / "supervisor"
    frozen = thaw(fake.spec.folder / FROZEN)
    assert frozen.run_dir == done.run_dir
    assert frozen.server.host == "auto", "found on the node that the job gets"
    assert (fake.spec.folder / FROZEN).stat().st_mode & 0o777 == 0o600


def test_a_job_that_is_there_is_told_with_its_state(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = JobView(
        job="5",
        state=SlurmJobState.PENDING,
        nodes=(),
        name="",
        comment="",
        workdir="",
        reason="Priority",
    )
    slurm(monkeypatch, found=there)
    done = submission.submit(toml)
    assert (done.job, done.found) == ("5", "pending Priority")
    assert not (done.run_dir / "supervisor" / FROZEN).exists()


def test_a_supervisor_that_is_there_now_is_named(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(monkeypatch)
    lease = Lease.take(toml.parent / "runs" / "r" / "lease")
    assert "pid " in submission.submit(toml).waits_for
    lease.release()
    assert submission.submit(toml).waits_for == ""


def test_an_address_in_the_file_would_be_wrong_on_another_node(toml: Path) -> None:
    toml.write_text(TOML + '[server]\nhost = "10.0.0.1"\n')
    with pytest.raises(ConfigError, match=r"^server\.host: 10\.0\.0\.1 is wrong .*auto"):
        submission.submit(toml)


def test_local_nodes_submit_nothing(toml: Path) -> None:
    toml.write_text('[run]\nname = "r"\n[job]\ncommand = ["true"]\n')
    for call in (submission.submit, submission.scripts):
        with pytest.raises(ConfigError, match=r"^nodes\.launcher: local submits nothing"):
            call(toml)


def test_a_finished_run_is_not_submitted(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "outcome_of", lambda _: Outcome.FINISHED)
    with pytest.raises(PreconditionError, match="run r is finished"):
        submission.submit(toml)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SlurmRefused("Invalid qos"), "Slurm refuses the supervisor's job: Invalid qos"),
        (SlurmUnavailable("timed out"), "timed out.*never makes a second job"),
    ],
)
def test_why_nothing_was_submitted_is_one_line(
    toml: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    slurm(monkeypatch, error=error)
    with pytest.raises(PreconditionError, match=said) as caught:
        submission.submit(toml)
    assert "\n" not in str(caught.value)


def test_both_scripts_are_shown_without_slurm_and_without_values(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("NCCL_DEBUG", "hidden")
    monkeypatch.setenv("LEAKED_SECRET", "hidden")
    before = sorted(toml.parent.rglob("*"))
    shown = submission.scripts(toml)
    assert "#SBATCH --nodes=3\n" in shown.allocation
    assert "#SBATCH --comment=r/0/launch/1\n" in shown.allocation
    assert "#SBATCH --comment=r/supervisor\n" in shown.supervisor
    assert "#SBATCH --requeue\n" in shown.supervisor
    assert "NCCL_DEBUG" in shown.variables
    assert "LEAKED_SECRET" not in shown.variables
    assert "hidden" not in f"{shown}"
    assert sorted(toml.parent.rglob("*")) == before


def call(*words: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.app(list(words))
    assert not caught.value.code


def test_check_renders_with_a_header_line_each(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call("check", str(toml), "--render")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("==== ")] == [
        "==== allocation",
        "==== supervisor",
        "==== variables that go along",
    ]
    assert lines.count("#!/bin/bash") == 2
    call("check", str(toml), "--render", "--json")
    shown = json.loads(capsys.readouterr().out)
    assert shown["allocation"] in "\n".join(lines) + "\n"


def test_submit_says_how_to_follow(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(monkeypatch)
    call("submit", str(toml))
    out = capsys.readouterr().out
    run_dir = toml.parent / "runs" / "r"
    for words in (
        "submitted job 7 (everstep-r-supervisor)",
        f"everstep status {run_dir}",
        f"tail -F {run_dir}/supervisor.log",
        f"everstep stop {run_dir}",
        "scancel 7",
    ):
        assert words in out
    call("submit", str(toml), "--json")
    assert json.loads(capsys.readouterr().out)["job"] == "7"


def test_a_frozen_file_is_read_as_a_run_file_is(toml: Path) -> None:
    config: RunConfig = load(toml)
    freeze(config, toml.with_suffix(".json"))
    assert read(toml.with_suffix(".json")) == config
