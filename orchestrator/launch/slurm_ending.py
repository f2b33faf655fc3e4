"""How a job ended, from what Slurm remembers of it. Pure: text in, values out.

Source of the words: squeue(1) and sacct(1), "JOB STATE CODES"; scontrol(1), "show job".
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from orchestrator.core.events import Ending
from orchestrator.launch.slurm_node_text import NodeView, moment
from orchestrator.launch.slurm_text import (
    SlurmJobState,
    decoded,
    expand,
    job_state,
    one_line,
    records_of,
    word_of,
)

SACCT_FORMAT = "State,Start,End,NodeList"
DRAINED_WITHIN = timedelta(seconds=30)
NO_ACCOUNTING = re.compile(r"accounting storage is disabled", re.IGNORECASE)
# What slurmctld writes itself as it drains a node on which it could not start a job.
# Source: validate_node_specs in node_mgr.c of 22.05 to 25.05.
LAUNCH_FAILED = re.compile(r"prolog|batch job complete failure|launch fail", re.IGNORECASE)

_S = SlurmJobState
MAY_NOT_HAVE_STARTED = (_S.CANCELLED, _S.FAILED)
ENDING_OF: Mapping[SlurmJobState, Ending] = {
    **dict.fromkeys(SlurmJobState, Ending.UNKNOWN),
    _S.CANCELLED: Ending.CANCELLED,
    _S.COMPLETED: Ending.COMPLETED,
    _S.PREEMPTED: Ending.PREEMPTED,
    **dict.fromkeys((_S.TIMEOUT, _S.DEADLINE), Ending.TIME_LIMIT),
    **dict.fromkeys(
        (
            *(_S.FAILED, _S.NODE_FAIL, _S.OUT_OF_MEMORY, _S.BOOT_FAIL, _S.LAUNCH_FAILED),
            _S.RECONFIG_FAIL,
        ),
        Ending.FAILED,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """What is remembered of a job that is over.

    Attributes:
        preempted: Whether it had been told to make room; sacct does not say.
        said: Slurm's reason and the batch script's exit code, where they tell of a failure.
    """

    state: SlurmJobState
    start: datetime | None
    end: datetime | None
    nodes: tuple[str, ...]
    preempted: bool = False
    said: str = ""


def scontrol_end(output: bytes) -> JobEnd | None:
    """Read `scontrol show job JOB`."""
    for record in records_of(decoded(output), "JobId"):
        return JobEnd(
            state=job_state(word_of(record, "JobState")),
            start=moment(word_of(record, "StartTime")),
            end=moment(word_of(record, "EndTime")),
            nodes=expand(word_of(record, "NodeList")),
            preempted=moment(word_of(record, "PreemptTime")) is not None,
            said=_said(word_of(record, "Reason"), word_of(record, "ExitCode")),
        )
    return None


def scontrol_excluded(output: bytes) -> tuple[tuple[str, ...], int]:
    """Read of `scontrol show job JOB` the nodes that it must not get, and how often it began."""
    for record in records_of(decoded(output), "JobId"):
        restarts = word_of(record, "Restarts")
        return expand(word_of(record, "ExcNodeList")), int(restarts) if restarts.isdigit() else 0
    return (), 0


def has_no_books(stderr: str) -> bool:
    """Whether sacct says that this cluster keeps no books."""
    return NO_ACCOUNTING.search(stderr) is not None


def sacct_end(output: bytes) -> JobEnd | None:
    """Read `sacct --allocations --noheader --parsable2 --format=SACCT_FORMAT`; the last counts."""
    lines = [line.split("|") for line in decoded(output).split("\n")]
    found = [fields for fields in lines if len(fields) == SACCT_FORMAT.count(",") + 1]
    if not found:
        return None
    state, start, end, nodes = found[-1]
    return JobEnd(state=job_state(state), start=moment(start), end=moment(end), nodes=expand(nodes))


def ending(job: JobEnd, nodes: Iterable[NodeView]) -> tuple[Ending, str]:
    """Say how a job ended, and why where Slurm's state alone would mislead.

    Some of its states do. When a node's prolog fails, Slurm cancels a job that must not be
    requeued, as if a person had; or the batch script, on another node, ends with what its srun met
    before Slurm comes to that. And a job that leaves while it is being preempted counts as
    completed or failed, whichever its processes said.

    Args:
        job: What is remembered of it.
        nodes: The nodes that it had, as they are now.
    """
    if job.state in MAY_NOT_HAVE_STARTED:
        for node in nodes:
            if _failed_to_launch(node, job):
                return Ending.FAILED, one_line(f"could not start on {node.name}: {node.reason}")
    if job.preempted and job.state in (SlurmJobState.COMPLETED, SlurmJobState.FAILED):
        return Ending.PREEMPTED, "left while it was being preempted"
    how = ENDING_OF[job.state]
    return how, job.said if how is Ending.FAILED else ""


def _said(reason: str, exit_code: str) -> str:
    """Return in words what Slurm gives as its reason, and as `3:0`: exit code and signal."""
    code, _, signum = exit_code.partition(":")
    told = [reason] if reason else []
    if code not in ("", "0"):
        told.append(f"exit code {code}")
    if signum not in ("", "0"):
        told.append(f"ended by signal {signum}")
    return one_line(", ".join(told))


def _failed_to_launch(node: NodeView, job: JobEnd) -> bool:
    if node.since is None or job.start is None or job.end is None or node.since < job.start:
        return False
    is_then = abs(node.since - job.end) <= DRAINED_WITHIN
    return is_then and LAUNCH_FAILED.search(node.reason) is not None
