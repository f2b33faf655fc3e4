"""The Slurm launcher without Slurm: what is asked for, passed on, and made of the answers."""

import dataclasses
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monitors.observations import Ok, Unknown
from orchestrator.core.events import Ending
from orchestrator.launch import slurm, slurm_commands, slurm_look, slurm_submit
from orchestrator.launch.launcher import AllocationSpec, LaunchRefusedError
from orchestrator.launch.slurm import SlurmLauncher
from orchestrator.launch.slurm_commands import (
    NoBooksError,
    SlurmRefused,
    SlurmUnavailable,
    allowed,
    ask,
    end_in_the_books,
    jobs_by_id,
)
from orchestrator.launch.slurm_ending import JobEnd, sacct_end
from orchestrator.launch.slurm_node_text import NodeView
from orchestrator.launch.slurm_options import SlurmOptions
from orchestrator.launch.slurm_text import JobView, SlurmJobState

RUN_DIR = Path("/shared/run dir")
FOLDER = RUN_DIR / "submitit" / "r-0-launch-1"
SPEC = AllocationSpec(key="r/0/launch/1", name="r", nodes=3, gpus_per_node=8, run_dir=RUN_DIR)
REQUEST = slurm_submit.request_of(SPEC, SlurmOptions())


def view(state: SlurmJobState = SlurmJobState.RUNNING, **changes: Any) -> JobView:
    values: dict[str, Any] = {
        "job": "7",
        "state": state,
        "nodes": ("n1", "n2"),
        "name": "everstep-r",
        "comment": "r/0/launch/1",
        "workdir": str(FOLDER),
        "reason": "",
    }
    return JobView(**{**values, **changes})


def script(options: SlurmOptions, spec: AllocationSpec = SPEC) -> list[str]:
    """The batch script as submitit renders it."""
    return slurm_submit.render(spec, options).splitlines()


def test_an_allocation_outlives_its_nodes_and_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # also where no srun is
    lines = script(SlurmOptions())
    for line in (
        "--nodes=3",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--no-kill",
        "--no-requeue",
        "--job-name=everstep-r",
        "--comment=r/0/launch/1",
        f"--chdir='{FOLDER}'",
        "--export=ALL",
    ):
        assert f"#SBATCH {line}" in lines
    (srun,) = (line for line in lines if line.startswith("srun "))
    assert "--no-kill --kill-on-bad-exit=0 --wait=0 --cpu-bind=none" in srun
    assert not [line for line in lines if "--time" in line or "--wckey" in line]


def test_what_the_site_wants_is_passed_on_and_quoted() -> None:
    options = SlurmOptions(
        partition="train",
        account="ml",
        qos="high",
        reservation="week 7",
        constraint="h100&ib",
        exclude="n[1-3]",
        time_min=90,
        options={"mem": 0, "exclusive": True},
        prologue=("module load cuda", "export A=1"),
    )
    lines = script(options)
    for line in (
        "--partition=train",
        "--account=ml",
        "--qos=high",
        "--reservation='week 7'",
        "--constraint='h100&ib'",
        "--exclude='n[1-3]'",
        "--time=90",
        "--mem=0",
        "--exclusive",
    ):
        assert f"#SBATCH {line}" in lines
    assert lines.index("module load cuda") + 1 == lines.index("export A=1")
    assert lines.index("export A=1") < next(n for n, s in enumerate(lines) if s[:5] == "srun ")


def test_nodes_that_must_not_be_given_join_those_that_the_site_excludes() -> None:
    spec = dataclasses.replace(SPEC, exclude=("n7", "n9"))
    assert "#SBATCH --exclude=n7,n9" in script(SlurmOptions(), spec)
    assert "#SBATCH --exclude='n[1-3],n7,n9'" in script(SlurmOptions(exclude="n[1-3]"), spec)


def test_agents_are_warned_as_long_before_the_time_limit_as_was_asked_for() -> None:
    assert "#SBATCH --signal=USR2@45" in script(SlurmOptions(time_min=10, warn_s=45))


def test_what_is_rendered_has_all_that_is_run() -> None:
    lines = script(SlurmOptions(export=("NCCL_*",)))
    assert lines[0] == "#!/bin/bash"
    assert lines[-1].endswith(f" -P -u -m submitit.core._submit '{FOLDER}'")
    assert not FOLDER.exists()


def test_only_a_living_job_of_this_very_run_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = (
        view(SlurmJobState.COMPLETING, job="1"),
        view(SlurmJobState.CANCELLED, job="2"),
        view(comment="r/0/launch/2", job="3"),
        view(workdir="/elsewhere/submitit", job="4"),
    )
    monkeypatch.setattr(slurm_submit, "jobs_named", lambda _: strangers)
    assert slurm_submit.find(FOLDER, REQUEST) == ""
    ours = (*strangers, view(SlurmJobState.PENDING, job="5"))
    monkeypatch.setattr(slurm_submit, "jobs_named", lambda _: ours)
    assert slurm_submit.find(FOLDER, REQUEST) == "5"


def test_of_the_environment_only_what_is_allowed_goes_to_slurm() -> None:
    environ = {
        "PATH": "/bin",
        "LC_TIME": "C",
        "SLURM_CONF": "/etc/slurm.conf",
        "AWS_PROFILE": "p",
        "NCCL_DEBUG": "INFO",
        "SLURM_CPU_BIND": "map_cpu:0",
        "SLURM_JOB_ID": "1",
        "SBATCH_PARTITION": "x",
        "SQUEUE_FORMAT": "%i",
        "WANDB_API_KEY": "secret",
        "PWD": "/",
    }
    kept = {"PATH", "LC_TIME", "SLURM_CONF", "AWS_PROFILE"}
    assert set(allowed(environ)) == kept
    assert set(allowed(environ, ("NCCL_*",))) == {*kept, "NCCL_DEBUG"}


class Answers:
    """What Slurm's commands say, one after the other; the last one is repeated."""

    def __init__(self, *answers: tuple[int, str] | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    def __call__(self, argv: list[str], **_: Any) -> "subprocess.CompletedProcess[bytes]":
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        code, text = answer
        return subprocess.CompletedProcess(argv, code, text.encode(), text.encode())


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(slurm_commands, "RETRY_S", 0.0)
    monkeypatch.setattr(slurm_commands, "RETRY_LONGEST_S", 0.0)

    def give(*given: tuple[int, str] | Exception) -> Answers:
        made = Answers(*given)
        monkeypatch.setattr(slurm_commands.subprocess, "run", made)
        return made

    return give


AWAY = (1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
NO_JOB = (1, "slurm_load_jobs error: Invalid job id specified")


def test_no_answer_is_asked_for_again_and_a_refusal_is_not(answers: Any) -> None:
    answers(AWAY, (0, "x"))
    assert ask(["squeue"]) == b"x"
    for silence in (AWAY, subprocess.TimeoutExpired("squeue", 1), FileNotFoundError(2, "no file")):
        made = answers(silence)
        with pytest.raises(SlurmUnavailable):
            ask(["squeue"])
        assert made.asked == slurm_commands.TRIES
    made = answers((1, "squeue: error: Invalid user: nobody"))
    with pytest.raises(SlurmRefused, match=r"squeue: Invalid user: nobody"):
        ask(["squeue"])
    assert made.asked == 1


def test_an_unknown_job_is_none_and_no_answer_is_not(answers: Any) -> None:
    answers(NO_JOB)
    assert not jobs_by_id(["7"])
    answers((0, ""))
    assert not jobs_by_id(["7", "8"])
    answers(AWAY)
    with pytest.raises(SlurmUnavailable):
        jobs_by_id(["7"])


def test_a_cluster_without_books_is_told_from_books_that_do_not_answer(
    answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_commands.shutil, "which", lambda _: "/usr/bin/sacct")
    answers((1, "Slurm accounting storage is disabled"))
    with pytest.raises(NoBooksError):
        end_in_the_books("7")
    answers((1, "sacct: error: slurm_persist_conn_open: failed to send"))
    with pytest.raises(SlurmRefused) as caught:
        end_in_the_books("7")
    assert not isinstance(caught.value, NoBooksError)
    monkeypatch.setattr(slurm_commands.shutil, "which", lambda _: None)
    with pytest.raises(NoBooksError):
        end_in_the_books("7")


@pytest.fixture
def launcher(tmp_path: Path) -> SlurmLauncher:
    for node in ("n1", "n2", "n3"):
        folder = tmp_path / "nodes" / node
        folder.mkdir(parents=True)
        (folder / "agent.json").write_text(json.dumps({"pid": 1, "started": 1, "job": "7"}))
    return SlurmLauncher(tmp_path, SlurmOptions())


def looks(
    monkeypatch: pytest.MonkeyPatch, *jobs: JobView, end: JobEnd | None = None, **states: str
) -> list[str]:
    """Have Slurm say this; returns what it is asked for."""
    asked: list[str] = []

    def jobs_of(wanted: list[str]) -> dict[str, JobView]:
        asked.append("squeue " + " ".join(wanted))
        return {job.job: job for job in jobs if job.job in wanted}

    def nodes_of(names: list[str]) -> dict[str, NodeView]:
        asked.append("nodes " + " ".join(names))
        return {
            name: NodeView(name=name, state=states.get(name, "MIXED"), reason="", since=None)
            for name in names
        }

    monkeypatch.setattr(slurm_look, "jobs_by_id", jobs_of)
    monkeypatch.setattr(slurm_look, "nodes_named", nodes_of)
    monkeypatch.setattr(slurm_look, "reservations", lambda: ())
    monkeypatch.setattr(slurm_look, "job_record", lambda _: b"")
    monkeypatch.setattr(slurm_look, "end_in_the_books", lambda _: end)
    return asked


def test_a_node_that_left_the_job_or_is_down_is_lost_and_no_other(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, view(), n2="DOWN*")
    seen = launcher.observe("7")
    assert isinstance(seen, Ok)
    assert seen.value.nodes == {"n2": False, "n3": False}
    assert seen.value.running


def test_the_nodes_of_another_allocation_are_never_lost_with_this_one(
    launcher: SlurmLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, view(job="8", nodes=("n4",)), view(), n1="DOWN")
    (tmp_path / "nodes" / "n4").mkdir()
    (tmp_path / "nodes" / "n4" / "agent.json").write_text('{"pid": 1, "started": 1, "job": "8"}')
    seen = launcher.observe("8")
    assert isinstance(seen, Ok)
    assert seen.value.nodes == {}


@pytest.mark.parametrize(
    ("job", "running", "queued"),
    [
        (view(job="1"), False, ""),
        (view(SlurmJobState.PENDING, nodes=(), reason="Priority"), True, "pending, Priority"),
        (view(SlurmJobState.CONFIGURING), True, "configuring"),
        (view(SlurmJobState.COMPLETING), False, ""),
        (view(SlurmJobState.SUSPENDED), True, ""),
    ],
)
def test_a_job_waits_runs_or_is_gone(
    launcher: SlurmLauncher,
    monkeypatch: pytest.MonkeyPatch,
    job: JobView,
    running: bool,
    queued: str,
) -> None:
    looks(monkeypatch, job)
    seen = launcher.observe("7")
    assert isinstance(seen, Ok)
    assert (seen.value.running, seen.value.queued) == (running, queued)


def test_a_state_that_is_not_known_here_is_unknown(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, view(SlurmJobState.UNKNOWN))
    assert isinstance(launcher.observe("7"), Unknown)


def test_slurm_is_asked_seldom_and_more_seldom_while_it_fails(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    asked: list[float] = []

    def look(_: list[str]) -> dict[str, JobView]:
        asked.append(now[0])
        raise SlurmUnavailable("squeue: no answer")

    monkeypatch.setattr(slurm_look, "jobs_by_id", look)
    monkeypatch.setattr(slurm_look.time, "monotonic", lambda: now[0])
    for _ in range(2000):
        assert isinstance(launcher.observe("7"), Unknown)
        now[0] += 0.25
    gaps = [later - first for first, later in itertools.pairwise(asked)]
    assert gaps == sorted(gaps)
    assert gaps[0] == 2 * slurm_look.LOOK_EVERY_S
    assert gaps[-1] == slurm_look.LOOK_SLOWEST_S


def test_slurm_may_be_away_for_days(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_: list[str]) -> dict[str, JobView]:
        raise SlurmUnavailable("squeue: no answer")

    monkeypatch.setattr(slurm_look, "jobs_by_id", silent)
    for _ in range(1100):  # beyond what a float holds as a power of two
        assert isinstance(launcher.observe("7", fresh=True), Unknown)


def test_one_look_asks_for_all_jobs_and_all_their_nodes(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = looks(monkeypatch, view(), view(job="8", nodes=("n4", "n5")))
    launcher.observe("7")
    launcher.observe("8")
    assert asked[-2:] == ["squeue 7 8", "nodes n1 n2 n4 n5"]
    before = len(asked)
    launcher.observe("7")
    launcher.observe("8")
    assert len(asked) == before
    launcher.observe("7", fresh=True)
    assert asked[before:] == ["squeue 7 8", "nodes n1 n2 n4 n5"]


@pytest.mark.parametrize(
    ("job", "end", "how"),
    [
        (view(SlurmJobState.COMPLETING), None, Ending.UNKNOWN),
        (view(SlurmJobState.CANCELLED), None, Ending.CANCELLED),
        (view(SlurmJobState.TIMEOUT), None, Ending.TIME_LIMIT),
        (view(job="1"), None, Ending.UNKNOWN),
        (view(job="1"), "PREEMPTED|Unknown|Unknown|n1\n", Ending.PREEMPTED),
    ],
)
def test_how_a_job_ended_is_told_by_slurm_or_by_its_books(
    launcher: SlurmLauncher,
    monkeypatch: pytest.MonkeyPatch,
    job: JobView,
    end: str | None,
    how: Ending,
) -> None:
    asked = looks(monkeypatch, job, end=sacct_end(end.encode()) if end else None)
    seen = launcher.observe("7")
    assert isinstance(seen, Ok)
    assert not seen.value.running
    assert seen.value.ending is how
    before = len(asked)
    launcher.observe("7", fresh=True)
    is_asked_again = len(asked) > before
    assert is_asked_again is (how is Ending.UNKNOWN)


def test_books_that_there_are_not_are_asked_for_once(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch)
    asked: list[str] = []

    def no_books(job: str) -> JobEnd | None:
        asked.append(job)
        raise NoBooksError("sacct: Slurm accounting storage is disabled")

    monkeypatch.setattr(slurm_look, "end_in_the_books", no_books)
    for job in ("7", "7", "8"):
        seen = launcher.observe(job, fresh=True)
        assert isinstance(seen, Ok)
        assert seen.value.ending is Ending.UNKNOWN
    assert asked == ["7"]


def test_books_that_do_not_answer_hide_the_end_of_one_job_and_nothing_else(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, view())

    def silent(job: str) -> JobEnd | None:
        raise SlurmUnavailable("sacct: connection refused")

    monkeypatch.setattr(slurm_look, "end_in_the_books", silent)
    assert isinstance(launcher.observe("8"), Unknown)
    assert isinstance(launcher.observe("7", fresh=True), Ok)


def test_a_job_that_an_admin_holds_is_held_for_us_only_after_it_had_begun(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for restarts, held in ((0, False), (1, True)):
        waiting = view(SlurmJobState.PENDING, nodes=(), reason="JobHeldAdmin")
        looks(monkeypatch, waiting)
        record = f"JobId=7 JobName=x\n   Requeue=1 Restarts={restarts}\n".encode()
        monkeypatch.setattr(slurm_look, "job_record", lambda _, record=record: record)
        seen = launcher.observe("7", fresh=True)
        assert isinstance(seen, Ok)
        assert seen.value.held is held


def test_what_is_not_held_or_refused_by_slurm_cannot_be_released(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = view(SlurmJobState.PENDING, nodes=(), reason="launch failed requeued held")
    record = b"JobId=7 JobName=x\n   ReqNodeList=(null) ExcNodeList=n[1-2]\n"
    released: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(slurm, "job_record", lambda _: record)
    monkeypatch.setattr(slurm, "release_job", lambda job, names: released.append((job, names)))
    monkeypatch.setattr(slurm, "known_to_slurm", tuple)
    for answer in ({}, {"7": view()}):
        monkeypatch.setattr(slurm, "jobs_by_id", lambda _, answer=answer: answer)
        with pytest.raises(LaunchRefusedError, match="job 7 is not held"):
            launcher.unhold("7", ("n3",))
    assert not released
    monkeypatch.setattr(slurm, "jobs_by_id", lambda _: {"7": held})
    launcher.unhold("7", ("n3", "n2"))
    assert released == [("7", ("n1", "n2", "n3"))]

    def refuse(job: str, names: tuple[str, ...]) -> None:
        raise SlurmRefused("scontrol: Access/permission denied")

    monkeypatch.setattr(slurm, "release_job", refuse)
    with pytest.raises(LaunchRefusedError, match="permission denied"):
        launcher.unhold("7", ())


def test_a_cancel_without_an_answer_is_no_error(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(_: list[str]) -> dict[str, JobView]:
        raise SlurmUnavailable("squeue: no answer")

    monkeypatch.setattr(slurm, "jobs_by_id", silent)
    launcher.cancel("7")
    assert "scancel 7" in caplog.text


def test_a_number_that_slurm_gave_to_another_job_since_is_not_cancelled(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    homes = ("/home/me/work", "/elsewhere/submitit/r-0-launch-1")
    ours = f"/mnt/another/way/{tmp_path.name}/submitit/r-0-launch-1"
    cancelled: list[str] = []
    monkeypatch.setattr(slurm, "CANCEL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(slurm, "cancel_jobs", cancelled.extend)
    for workdir in (*homes, ours):
        job = view(SlurmJobState.PENDING, workdir=workdir)
        monkeypatch.setattr(slurm, "jobs_by_id", lambda _, job=job: {"7": job})
        launcher.cancel("7")
        assert cancelled == (["7"] if workdir == ours else [])


def test_giving_all_back_finds_jobs_that_nobody_noted_and_no_others(
    launcher: SlurmLauncher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "submitit"
    jobs = (
        view(job="1", workdir=str(folder / "r-0-launch-1")),
        view(SlurmJobState.PENDING, job="2", workdir=str(folder / "r-0-launch-2")),
        view(SlurmJobState.COMPLETING, job="3", workdir=str(folder / "r-0-launch-3")),
        view(job="4", workdir="/elsewhere/submitit/r-0-launch-1"),
    )
    cancelled: list[str] = []
    monkeypatch.setattr(slurm, "jobs_of_user", lambda: jobs)
    monkeypatch.setattr(slurm, "jobs_by_id", lambda _: {})
    monkeypatch.setattr(slurm, "GOODBYE_S", 0.0)
    (tmp_path / "nodes" / "n1" / "agent.json").write_text('{"job": "1"}')
    monkeypatch.setattr(slurm, "LEAVING_S", 0.0)
    monkeypatch.setattr(slurm, "cancel_jobs", cancelled.extend)
    launcher.cancel("")
    assert cancelled == ["1", "2"]


def test_only_nodes_that_the_cluster_has_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was taken out of it would have every request refused."""
    asked: list[list[str]] = []

    def ask(argv: list[str]) -> bytes:
        asked.append(argv)
        return b"node1|idle|none\nnode2|drained|bad fan\n"

    monkeypatch.setattr(slurm_commands, "ask", ask)
    assert slurm_commands.known_to_slurm(("node2", "node9")) == ("node2",)
    assert slurm_commands.known_to_slurm(()) == ()
    assert [argv[0] for argv in asked] == ["sinfo"]
