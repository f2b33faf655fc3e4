"""Slurm's outputs, captured and written after its manual pages, as values."""

from pathlib import Path

import pytest

from orchestrator.launch import slurm_ending as ends
from orchestrator.launch import slurm_node_text as nodes
from orchestrator.launch import slurm_text as text
from orchestrator.launch.slurm_text import FATE_OF, JobFate, SlurmJobState, expand, job_state

DATA = Path(__file__).parents[2] / "data" / "slurm"
SEPARATOR = text.SEPARATOR


def data(name: str) -> bytes:
    return (DATA / f"{name}.txt").read_bytes()


def test_every_state_has_one_meaning_and_every_code_a_state() -> None:
    assert set(FATE_OF) == set(SlurmJobState)
    assert len(text.CODES) == len(set(text.CODES.values()))
    assert {state for state, fate in FATE_OF.items() if fate is JobFate.UNKNOWN} == {
        SlurmJobState.UNKNOWN
    }


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("RUNNING", SlurmJobState.RUNNING),
        ("PD", SlurmJobState.PENDING),
        ("CANCELLED by 20013", SlurmJobState.CANCELLED),
        ("CANCELLED+", SlurmJobState.CANCELLED),
        ("COMPLETED,COMPLETING", SlurmJobState.COMPLETED),
        ("RUNNING+SIGNALING", SlurmJobState.RUNNING),
        (" node_fail ", SlurmJobState.NODE_FAIL),
        ("EXPEDITING", SlurmJobState.UNKNOWN),
        ("", SlurmJobState.UNKNOWN),
        ("\ufffd", SlurmJobState.UNKNOWN),
    ],
)
def test_a_state_is_read_in_all_its_forms(said: str, state: SlurmJobState) -> None:
    assert job_state(said) is state


def test_a_running_job_of_squeue() -> None:
    (job,) = text.squeue_jobs(data("squeue-running-22.05"))
    assert (job.job, job.fate, job.nodes) == ("1", JobFate.RUNNING, ("node1", "node2", "node3"))
    assert (job.name, job.comment, job.workdir) == ("everstep-cap", "cap/0/launch/1", "/tmp/slm")
    assert job.reason == ""


def test_pending_jobs_of_squeue_have_reasons_and_no_nodes() -> None:
    jobs = {job.job: job for job in text.squeue_jobs(data("squeue-pending-22.05"))}
    assert [jobs[n].reason for n in "23"] == ["PartitionConfig", "Priority"]
    assert all(jobs[n].fate is JobFate.PENDING and not jobs[n].nodes for n in "23")


def test_cancelled_and_completing_jobs_are_gone() -> None:
    jobs = text.squeue_jobs(data("squeue-cancelled-22.05"))
    assert {job.fate for job in jobs} == {JobFate.GONE}


def test_a_lost_node_has_left_the_list_of_a_job_that_runs_on() -> None:
    jobs = {job.job: job for job in text.squeue_jobs(data("squeue-node-lost-22.05"))}
    assert jobs["1"].fate is JobFate.RUNNING
    assert jobs["1"].nodes == ("node2", "node3")
    (shown,) = text.scontrol_jobs(data("scontrol-job-node-lost-22.05"))
    assert shown.nodes == ("node2", "node3")


def test_a_job_that_slurm_holds_after_a_failed_launch_is_told_from_others() -> None:
    (held,) = text.squeue_jobs(data("squeue-held-22.05"))
    assert (held.state, held.is_held) == (SlurmJobState.PENDING, True)
    (shown,) = text.scontrol_jobs(data("scontrol-job-held-22.05"))
    assert shown.is_held
    jobs = {job.job: job for job in text.squeue_jobs(data("squeue-25.05-handwritten"))}
    assert [name for name, job in jobs.items() if job.is_held] == ["8812037_[1-4%2]"]
    for name in ("squeue-pending-22.05", "squeue-running-22.05", "squeue-prolog-22.05"):
        assert not [job for job in text.squeue_jobs(data(name)) if job.is_held]


@pytest.mark.parametrize(
    ("state", "reason", "held"),
    [
        (SlurmJobState.PENDING, "job requeued in held state", True),
        (SlurmJobState.REQUEUE_HOLD, "", True),
        (SlurmJobState.PENDING, "JobHeldUser", False),
        (SlurmJobState.PENDING, "JobHeldAdmin", False),
        (SlurmJobState.RUNNING, "launch failed requeued held", False),
    ],
)
def test_a_job_that_a_person_holds_is_left_to_that_person(
    state: SlurmJobState, reason: str, held: bool
) -> None:
    job = text.JobView(
        job="1", state=state, nodes=(), name="", comment="", workdir="", reason=reason
    )
    assert job.is_held is held


def test_a_time_of_the_configuration() -> None:
    assert text.config_seconds(data("scontrol-config-22.05"), "KillWait") == 3.0
    assert text.config_seconds(data("scontrol-config-22.05"), "MaxWait") is None


def test_newer_words_breaks_in_reasons_and_odd_bytes_do_not_disturb() -> None:
    jobs = {job.job: job for job in text.squeue_jobs(data("squeue-25.05-handwritten"))}
    assert list(jobs) == [*(str(8812034 + n) for n in range(3)), "8812037_[1-4%2]", *_last_two()]
    assert len(jobs["8812034"].nodes) == 8
    assert jobs["8812034"].workdir == "/home/ada/run dir/submitit"
    reason = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority"
    assert jobs["8812035"].reason.startswith(reason)
    assert jobs["8812036"].fate is JobFate.PENDING
    assert jobs["8812037_[1-4%2]"].reason == "launch failed requeued held"
    assert jobs["8812038"].fate is JobFate.UNKNOWN
    assert jobs["8812039"].name == "odd-\ufffd\ufffd"


def _last_two() -> tuple[str, str]:
    return "8812038", "8812039"


def test_scontrol_tells_the_same_of_a_job_as_squeue() -> None:
    (job,) = text.squeue_jobs(data("squeue-running-22.05"))
    assert text.scontrol_jobs(data("scontrol-job-22.05")) == (job,)
    (job, *_) = text.squeue_jobs(data("squeue-25.05-handwritten"))
    assert text.scontrol_jobs(data("scontrol-job-25.05-handwritten")) == (job,)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("n1", ("n1",)),
        ("n[1-3,7]", ("n1", "n2", "n3", "n7")),
        ("n[1-2],gpu-a[001-002]-b", ("n1", "n2", "gpu-a001-b", "gpu-a002-b")),
        ("r[1-2]n[08-10]", ("r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10")),
        ("a,b.c", ("a", "b.c")),
        ("(null)", ()),
        ("", ()),
        ("n[", ("n",)),
        ("n[x-y]", ()),
        ("n[1-999999999]", ()),
        ("n[1-1000]m[1-1000]", ()),
    ],
)
def test_lists_of_nodes_are_expanded(said: str, names: tuple[str, ...]) -> None:
    assert expand(said) == names


def test_a_refusal_is_told_from_no_answer_and_said_in_one_line() -> None:
    refused = data("sbatch-refused-22.05").decode()
    assert not text.is_no_answer(refused)
    assert text.complaint(refused) == (
        "invalid partition specified: nowhere; "
        "Batch job submission failed: Invalid partition name specified"
    )
    assert text.is_no_answer(data("sbatch-unreachable-22.05").decode())
    assert text.is_no_answer("sbatch: error: Socket timed out on send/recv operation")
    assert text.is_no_such_job(data("squeue-invalid-22.05").decode())
    assert text.complaint("\n") == "no reason given"


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_what_is_cut_off_or_garbled_is_read_without_an_error(cut: int) -> None:
    for path in DATA.glob("*.txt"):
        body = path.read_bytes()
        for piece in (body[cut:], body[:cut], body[:cut] + b"\xff\x00\n" + body[cut:]):
            text.squeue_jobs(piece)
            text.scontrol_jobs(piece)
            nodes.scontrol_nodes(piece)
            nodes.sinfo_nodes(piece)
            nodes.scontrol_reservations(piece)
            ends.scontrol_end(piece)
            ends.scontrol_excluded(piece)
            ends.sacct_end(piece)
            text.config_seconds(piece, "KillWait")
