"""How a job ended, from what scontrol and sacct remember of it."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from orchestrator.core.events import Ending
from orchestrator.launch import slurm_ending as text
from orchestrator.launch.slurm_node_text import NodeView, scontrol_nodes
from orchestrator.launch.slurm_text import FATE_OF, JobFate, SlurmJobState

DATA = Path(__file__).parents[2] / "data" / "slurm"


def data(name: str) -> bytes:
    return (DATA / f"{name}.txt").read_bytes()


def test_every_state_has_an_ending_and_those_that_hide_or_have_none_are_unknown() -> None:
    assert set(text.ENDING_OF) == set(SlurmJobState)
    unknown = {state for state, how in text.ENDING_OF.items() if how is Ending.UNKNOWN}
    assert {state for state in unknown if FATE_OF[state] is JobFate.GONE} == {
        SlurmJobState.COMPLETING,
        SlurmJobState.STAGE_OUT,
        SlurmJobState.REVOKED,  # a sister job elsewhere goes on
    }
    assert all(FATE_OF[state] is JobFate.GONE for state in SlurmJobState if state not in unknown)


@pytest.mark.parametrize(
    ("capture", "how"),
    [
        ("completed", Ending.COMPLETED),
        ("failed", Ending.FAILED),
        ("scancel", Ending.CANCELLED),
        ("timeout", Ending.TIME_LIMIT),
        ("preempted", Ending.PREEMPTED),
        ("running", Ending.UNKNOWN),
    ],
)
def test_the_books_tell_how_a_job_ended(capture: str, how: Ending) -> None:
    job = text.sacct_end(data(f"sacct-{capture}-22.05"))
    assert job is not None
    assert text.ending(job, ()) == (how, "")


def test_the_last_line_of_the_books_counts() -> None:
    job = text.sacct_end(data("sacct-25.05-handwritten"))
    assert job is not None
    assert job.state is SlurmJobState.CANCELLED
    assert len(job.nodes) == 4
    assert text.sacct_end(b"") is None


@pytest.mark.parametrize(
    ("capture", "how"),
    [("scancel", Ending.CANCELLED), ("preempted-left", Ending.PREEMPTED)],
)
def test_slurms_memory_tells_more_than_the_books(capture: str, how: Ending) -> None:
    """Who leaves while it is being preempted counts as completed."""
    job = text.scontrol_end(data(f"scontrol-job-{capture}-22.05"))
    assert job is not None
    assert text.ending(job, ())[0] is how
    assert text.scontrol_end(b"") is None


def test_a_batch_script_that_failed_is_told_with_its_exit_code() -> None:
    """A prologue that ends the script is a mistake of the user's, who sees nothing else."""
    job = text.scontrol_end(data("scontrol-job-failed-22.05"))
    assert job is not None
    assert text.ending(job, ()) == (Ending.FAILED, "NonZeroExitCode, exit code 3")
    killed = data("scontrol-job-failed-22.05").replace(b"ExitCode=3:0", b"ExitCode=0:9")
    job = text.scontrol_end(killed.replace(b"Reason=NonZeroExitCode", b"Reason=None"))
    assert job is not None
    assert text.ending(job, ()) == (Ending.FAILED, "ended by signal 9")


@pytest.mark.parametrize("source", [text.scontrol_end, text.sacct_end])
def test_a_job_that_slurm_cancelled_as_a_prolog_failed_was_not_cancelled_by_a_person(
    source: object,
) -> None:
    job = (
        text.scontrol_end(data("scontrol-job-prolog-22.05"))
        if source is text.scontrol_end
        else text.sacct_end(data("sacct-prolog-22.05"))
    )
    assert job is not None
    nodes = scontrol_nodes(data("scontrol-nodes-prolog-22.05")).values()
    why = "could not start on node3: Prolog error"
    assert text.ending(job, nodes) == (Ending.FAILED, why)
    # The batch script, on another node, may end before Slurm cancels the job.
    ended = replace(job, state=SlurmJobState.FAILED, said="NonZeroExitCode, exit code 182")
    assert text.ending(ended, nodes) == (Ending.FAILED, why)


@pytest.mark.parametrize(
    ("reason", "after_s"),
    [("Prolog error", 3600), ("Prolog error", -1), ("rack 7", 0), ("", 0)],
)
def test_a_drain_of_another_time_or_for_another_reason_says_nothing(
    reason: str, after_s: int
) -> None:
    job = text.scontrol_end(data("scontrol-job-prolog-22.05"))
    assert job is not None
    assert job.start is not None
    since = job.start + timedelta(seconds=after_s)
    node = NodeView(name="node3", state="IDLE+DRAIN", reason=reason, since=since)
    assert text.ending(job, [node]) == (Ending.CANCELLED, "")


def test_a_cluster_without_accounting_says_so() -> None:
    assert text.has_no_books(data("sacct-disabled-22.05").decode())
    assert not text.has_no_books("sacct: error: Problem talking to the database")


def test_what_a_held_job_must_not_get_and_how_often_it_began() -> None:
    assert text.scontrol_excluded(data("scontrol-job-held-22.05")) == (("node1",), 1)
    assert text.scontrol_excluded(data("scontrol-job-22.05")) == ((), 0)
    assert text.scontrol_excluded(b"") == ((), 0)
