"""What Slurm's commands print, read in one place. Pure: text in, values out.

Written against captured outputs of 22.05 to 25.x (`tests/data/slurm`). Anything that is not
understood becomes `unknown`, never an error and never "gone".

Source of the words: squeue(1), sinfo(1) and scontrol(1), "JOB STATE CODES", "NODE STATE CODES".
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

SEPARATOR = "\x1f"  # in no name, path or reason
SQUEUE_FORMAT = SEPARATOR.join(("%i", "%T", "%N", "%j", "%k", "%Z", "%r"))
MAX_NODES = 100_000
MAX_REASON = 300


class SlurmJobState(StrEnum):
    """Slurm's words for a job's state, and one for all that are not known here."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    POWER_UP_NODE = "POWER_UP_NODE"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    RUNNING = "RUNNING"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"
    UPDATE_DB = "UPDATE_DB"
    COMPLETING = "COMPLETING"
    STAGE_OUT = "STAGE_OUT"
    BOOT_FAIL = "BOOT_FAIL"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    DEADLINE = "DEADLINE"
    FAILED = "FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REVOKED = "REVOKED"
    TIMEOUT = "TIMEOUT"
    UNKNOWN = "UNKNOWN"


class JobFate(StrEnum):
    """What a job's state means for those who wait for its nodes."""

    PENDING = "pending"
    RUNNING = "running"
    GONE = "gone"
    UNKNOWN = "unknown"


_S = SlurmJobState
FATE_OF: Mapping[SlurmJobState, JobFate] = {
    **dict.fromkeys(
        (
            *(_S.PENDING, _S.CONFIGURING, _S.POWER_UP_NODE, _S.REQUEUED, _S.REQUEUE_FED),
            *(_S.REQUEUE_HOLD, _S.RESV_DEL_HOLD, _S.SPECIAL_EXIT),
        ),
        JobFate.PENDING,
    ),
    **dict.fromkeys(
        (_S.RUNNING, _S.RESIZING, _S.SIGNALING, _S.STOPPED, _S.SUSPENDED, _S.UPDATE_DB),
        JobFate.RUNNING,
    ),
    **dict.fromkeys(
        (
            *(_S.COMPLETING, _S.STAGE_OUT, _S.BOOT_FAIL, _S.CANCELLED, _S.COMPLETED, _S.DEADLINE),
            *(_S.FAILED, _S.LAUNCH_FAILED, _S.NODE_FAIL, _S.OUT_OF_MEMORY, _S.PREEMPTED),
            *(_S.RECONFIG_FAIL, _S.REVOKED, _S.TIMEOUT),
        ),
        JobFate.GONE,
    ),
    _S.UNKNOWN: JobFate.UNKNOWN,
}

# "launch failed requeued held", "job requeued in held state" and their like; scontrol writes them
# with underscores. Source: job_mgr.c and slurm_protocol_defs.c of 22.05 to 25.05.
HELD = re.compile(r"requeued?[ _](in[ _])?held", re.IGNORECASE)
HELD_STATES = frozenset({_S.REQUEUE_HOLD, _S.SPECIAL_EXIT})

_CODES = """
BF BOOT_FAIL, CA CANCELLED, CD COMPLETED, CF CONFIGURING, CG COMPLETING, DL DEADLINE, F FAILED,
NF NODE_FAIL, OOM OUT_OF_MEMORY, PD PENDING, PR PREEMPTED, R RUNNING, RD RESV_DEL_HOLD,
RF REQUEUE_FED, RH REQUEUE_HOLD, RQ REQUEUED, RS RESIZING, RV REVOKED, S SUSPENDED,
SE SPECIAL_EXIT, SI SIGNALING, SO STAGE_OUT, ST STOPPED, TO TIMEOUT
"""
CODES: Mapping[str, SlurmJobState] = {
    code: SlurmJobState(word) for code, word in (pair.split() for pair in _CODES.split(","))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job as Slurm describes it; text fields are "" where it says nothing."""

    job: str
    state: SlurmJobState
    nodes: tuple[str, ...]
    name: str
    comment: str
    workdir: str
    reason: str

    @property
    def is_held(self) -> bool:
        """Whether it waits because a launch of it failed, until somebody releases it.

        Not one that a person holds on purpose.
        """
        return self.fate is JobFate.PENDING and (
            self.state in HELD_STATES or HELD.search(self.reason) is not None
        )

    @property
    def fate(self) -> JobFate:
        """What that means for those who wait for its nodes."""
        return FATE_OF[self.state]


def job_state(text: str) -> SlurmJobState:
    """Read a state: long, short, with a remark (`CANCELLED by 7`) or a flag (`FAILED+REQUEUED`).

    Of several words the first that is known counts.
    """
    for word in re.split(r"[\s,+*]+", text.strip().upper()):
        if word in CODES:
            return CODES[word]
        if word in SlurmJobState.__members__:
            return SlurmJobState[word]
    return SlurmJobState.UNKNOWN


def squeue_jobs(output: bytes) -> tuple[JobView, ...]:
    """Read `squeue --noheader --format=SQUEUE_FORMAT`; a line break in a reason is a space."""
    rows: list[list[str]] = []
    for line in decoded(output).split("\n"):
        fields = line.split(SEPARATOR)
        if len(fields) == SQUEUE_FORMAT.count(SEPARATOR) + 1:
            rows.append(fields)
        elif rows:
            rows[-1][-1] += f" {line}"
    return tuple(
        JobView(
            job=job,
            state=job_state(state),
            nodes=expand(nodes),
            name=value_of(name),
            comment=value_of(comment),
            workdir=value_of(workdir),
            reason=one_line(reason),
        )
        for job, state, nodes, name, comment, workdir, reason in rows
    )


def scontrol_jobs(output: bytes) -> tuple[JobView, ...]:
    """Read `scontrol show job`."""
    return tuple(
        JobView(
            job=word_of(record, "JobId"),
            state=job_state(word_of(record, "JobState")),
            nodes=expand(word_of(record, "NodeList")),
            name=word_of(record, "JobName"),
            comment=line_of(record, "Comment"),
            workdir=line_of(record, "WorkDir"),
            reason=one_line(word_of(record, "Reason")),
        )
        for record in records_of(decoded(output), "JobId")
    )


def config_seconds(output: bytes, key: str) -> float | None:
    """Read a time of `scontrol show config`, as `KillWait = 30 sec`; None when it is not there."""
    match = re.search(rf"^{key}\s*=\s*(\d+) sec", decoded(output), flags=re.MULTILINE)
    return float(match[1]) if match else None


def expand(node_list: str) -> tuple[str, ...]:
    """Return the names in a list such as `n[1-3,7],gpu-a[001-004]-b`; () when it is none.

    A list that cannot be read is as good as no list: the caller then knows of no node.
    """
    text = value_of(node_list)
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)
        choices = [
            tuple(_numbers(part)) if index % 2 else (part,) for index, part in enumerate(parts)
        ]
        size = 1
        for choice in choices:
            size *= len(choice)
        if not size or len(names) + size > MAX_NODES:
            return ()
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return tuple(names)


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)-(\d+)", part)
        if match is None:
            if part.isdigit():
                yield part
            continue
        low, high = match.groups()
        for number in range(int(low), min(int(high), int(low) + MAX_NODES) + 1):
            yield f"{number:0{len(low)}d}"


# Slurm's texts for "no answer": it may or may not have done what it was asked.
# Source: slurm_errno.c of 22.05 to 25.05, the communication errors.
NO_ANSWER = re.compile(
    r"unable to contact slurm controller|socket timed out|connection (refused|timed out|reset)"
    r"|communication connection failure|message (send|receive) failure|zero bytes were transmitted"
    r"|transport endpoint is not connected|resource temporarily unavailable|standby mode"
    r"|temporarily unable to accept job|unable to establish configuration source"
    r"|no route to host|network is unreachable|rate limit|insane message length",
    re.IGNORECASE,
)
NO_SUCH_JOB = re.compile(r"invalid job id", re.IGNORECASE)


def is_no_answer(stderr: str) -> bool:
    """Whether a failed command says that the controller did not answer."""
    return NO_ANSWER.search(stderr) is not None


def is_no_such_job(stderr: str) -> bool:
    """Whether a failed command says that the controller knows no such job."""
    return NO_SUCH_JOB.search(stderr) is not None


def complaint(stderr: str) -> str:
    """Return what a failed command said, without its name, in one line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    told = [re.sub(r"^\w+: (error|fatal): ", "", line) for line in lines]
    return one_line("; ".join(dict.fromkeys(told))) or "no reason given"


def one_line(text: str) -> str:
    """Return text for people: no line breaks, bounded, "" for Slurm's words for nothing."""
    return " ".join(value_of(text).split())[:MAX_REASON]


def decoded(output: bytes) -> str:
    """Return an output as text, whatever bytes are in it."""
    return output.decode(encoding="utf-8", errors="replace")


def value_of(text: str) -> str:
    """Return a value, "" for Slurm's words for nothing."""
    stripped = text.strip()
    return "" if stripped in ("(null)", "None", "N/A", "none") else stripped


def records_of(text: str, first: str) -> list[str]:
    """Split an output of scontrol; only a record's first line is not indented."""
    parts = re.split(rf"^(?={first}=)", text, flags=re.MULTILINE)
    return [part for part in parts if part.startswith(f"{first}=")]


def word_of(record: str, key: str) -> str:
    """Return a value without spaces; the first of its name, as free texts come last."""
    match = re.search(rf"(?:^|\s){key}=(\S*)", record)
    return value_of(match[1]) if match else ""


def line_of(record: str, key: str) -> str:
    """Return a value that has a line of its own."""
    match = re.search(rf"^\s+{key}=(.*)$", record, flags=re.MULTILINE)
    return value_of(match[1]) if match else ""
