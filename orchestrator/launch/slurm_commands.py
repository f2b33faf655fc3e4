"""Asks Slurm through its commands: each call with a timeout and few, bounded repetitions."""

import fnmatch
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence

import tenacity

from orchestrator.launch.slurm_ending import SACCT_FORMAT, JobEnd, has_no_books, sacct_end
from orchestrator.launch.slurm_node_text import (
    SINFO_FORMAT,
    NodeView,
    Reservation,
    scontrol_nodes,
    scontrol_reservations,
    sinfo_nodes,
)
from orchestrator.launch.slurm_text import (
    SQUEUE_FORMAT,
    JobView,
    complaint,
    config_seconds,
    is_no_answer,
    is_no_such_job,
    squeue_jobs,
)

COMMAND_TIMEOUT_S = 30.0
TRIES = 2
RETRY_S, RETRY_LONGEST_S = 0.5, 3.0

# What Slurm's commands, and with them the agents, get of this process's environment. Of Slurm's
# own variables only the one that says where the cluster is: SLURM_CPU_BIND, SBATCH_*, SQUEUE_*
# and their like change what a command does.
ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "SLURM_CONF"),
    *("VIRTUAL_ENV", "CONDA_*", "PYTHONPATH", "LD_LIBRARY_PATH", "MODULEPATH", "MODULESHOME"),
    *("AWS_*", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)


class SlurmError(Exception):
    """Slurm did not do it; one line for a person.

    SlurmError
      SlurmUnavailable    no answer: perhaps done, perhaps not
      SlurmRefused        an answer, and it is no
        NoBooksError      there is no accounting
    """


class SlurmUnavailable(SlurmError):
    """The controller or its command gave no answer."""


class SlurmRefused(SlurmError):
    """The controller said no."""


class NoBooksError(SlurmRefused):
    """This cluster keeps no accounts of jobs that are over."""


def allowed(environ: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the part of an environment that goes to Slurm.

    Args:
        environ: All variables.
        more: Names or patterns (`NCCL_*`) beyond `ALLOWED`.
    """
    patterns = (*ALLOWED, *more)
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def ask(argv: Sequence[str]) -> bytes:
    """Run one of Slurm's commands and return what it printed.

    Raises:
        SlurmUnavailable: It did not answer, also when asked again.
        SlurmRefused: It answered with an error.
    """
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(SlurmUnavailable),
        stop=tenacity.stop_after_attempt(TRIES),
        wait=tenacity.wait_exponential_jitter(multiplier=RETRY_S, max=RETRY_LONGEST_S),
        reraise=True,
    )
    return retrying(_ask_once, argv)


def _ask_once(argv: Sequence[str]) -> bytes:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            env=allowed(os.environ),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmUnavailable(f"{argv[0]} took longer than {COMMAND_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise SlurmUnavailable(f"cannot run {argv[0]}: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.decode(errors="replace")
    kind = SlurmUnavailable if is_no_answer(said) or done.returncode < 0 else SlurmRefused
    raise kind(f"{argv[0]}: {complaint(said)}")


def jobs_named(name: str) -> tuple[JobView, ...]:
    """Return this user's jobs of a name, those that ended lately included."""
    mine = f"--user={os.getuid()}"
    return squeue_jobs(ask(["squeue", *_AS_TOLD, mine, f"--name={name}"]))


def jobs_by_id(jobs: Sequence[str]) -> dict[str, JobView]:
    """Return jobs by their numbers, without those that Slurm does not know (any more)."""
    try:
        found = squeue_jobs(ask(["squeue", *_AS_TOLD, f"--jobs={','.join(jobs)}"]))
    except SlurmRefused as error:
        if is_no_such_job(str(error)):
            return {}
        raise
    return {view.job: view for view in found if view.job in jobs}


def jobs_of_user() -> tuple[JobView, ...]:
    """Return all of this user's jobs, those that ended lately included."""
    return squeue_jobs(ask(["squeue", *_AS_TOLD, f"--user={os.getuid()}"]))


def job_record(job: str) -> bytes:
    """Return all that Slurm remembers of a job, b"" when it knows none of this number."""
    try:
        return ask(["scontrol", "show", "job", job])
    except SlurmRefused as error:
        if is_no_such_job(str(error)):
            return b""
        raise


def nodes_named(names: Sequence[str]) -> dict[str, NodeView]:
    """Return nodes as Slurm describes them; one that the cluster has no more is left out.

    Slurm refuses the whole question for one such name.
    """
    if not names:
        return {}
    try:
        return scontrol_nodes(ask(["scontrol", "show", "node", ",".join(names)]))
    except SlurmRefused:
        known = known_to_slurm(names)
        if len(known) == len(names):
            raise
        return scontrol_nodes(ask(["scontrol", "show", "node", ",".join(known)])) if known else {}


def known_to_slurm(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the names that are nodes of this cluster.

    A request that names any other, as one that was taken out of the cluster, is refused.
    """
    if not names:
        return ()
    format_ = f"--format={SINFO_FORMAT}"
    found = sinfo_nodes(ask(["sinfo", "--noheader", "--all", "--Node", format_]))
    return tuple(name for name in names if name in found)


def reservations() -> tuple[Reservation, ...]:
    """Return all reservations."""
    return scontrol_reservations(ask(["scontrol", "show", "reservation"]))


def end_in_the_books(job: str) -> JobEnd | None:
    """Return how a job ended after sacct, None when it is not in the books.

    Raises:
        NoBooksError: This cluster keeps none.
    """
    words = ("--allocations", "--noheader", "--parsable2", f"--format={SACCT_FORMAT}")
    if shutil.which("sacct") is None:
        raise NoBooksError("no sacct in PATH")
    try:
        return sacct_end(ask(["sacct", *words, f"--jobs={job}"]))
    except SlurmRefused as error:
        if has_no_books(str(error)):
            raise NoBooksError(str(error)) from error
        raise


def kill_wait_s() -> float:
    """Return how long Slurm leaves a job between SIGTERM and SIGKILL."""
    seconds = config_seconds(ask(["scontrol", "show", "config"]), "KillWait")
    if seconds is None:
        raise SlurmRefused("scontrol: shows no KillWait")
    return seconds


def release_job(job: str, exclude: Sequence[str]) -> None:
    """Let a held job try again at once, never on nodes of `exclude`."""
    changes = [f"ExcNodeList={','.join(exclude)}"] if exclude else []
    ask(["scontrol", "update", f"JobId={job}", *changes, "StartTime=now"])
    ask(["scontrol", "release", job])


def cancel_jobs(jobs: Sequence[str]) -> None:
    """Ask for the end of jobs; those that ended before are no error."""
    ask(["scancel", *jobs])


_AS_TOLD = ("--noheader", "--states=all", f"--format={SQUEUE_FORMAT}")
