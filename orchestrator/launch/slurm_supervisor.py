"""The supervisor's own job: small, one per run, started again by Slurm when its node dies.

The job is known by name, comment and working directory, as an allocation is. Making one happens in
a child with the environment of the allow-list, which Slurm takes over for the job.
"""

import fcntl
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.launch.folders import note_of, write_note
from orchestrator.launch.slurm_child import request_given, submit_in_child, told_by_exit
from orchestrator.launch.slurm_commands import (
    SlurmRefused,
    SlurmUnavailable,
    ask,
    jobs_named,
    known_to_slurm,
)
from orchestrator.launch.slurm_options import SlurmOptions
from orchestrator.launch.slurm_text import JobFate, JobView, SlurmJobState

if TYPE_CHECKING:
    from orchestrator.launch.slurm_executor import Executor

PICKLE = "supervisor.pkl"
FROZEN = "run.json"  # in the job's folder: the run file as it was when the job was made
LOG = "supervisor.log"  # in the run directory
WARN_S = 120  # Slurm may be a minute early, and asking it to start the job again takes moments
SETTLE_S = 60.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSpec:
    """The job of one run's supervisor.

    Attributes:
        run: The run's name.
        folder: The job's own folder, where every node sees it; also the argument of `entry`.
        options: What sbatch is told.
        exclude: Nodes that no run is to have.
        entry: `module:function` that the job calls with the folder.
    """

    run: str
    folder: Path
    options: SlurmOptions
    exclude: tuple[str, ...] = ()
    entry: str = "orchestrator.supervisor_job:keep_supervising"

    @property
    def job_name(self) -> str:
        """Its name in Slurm."""
        return f"everstep-{self.run}-supervisor"

    @property
    def comment(self) -> str:
        """Its comment in Slurm; no allocation has the same."""
        return f"{self.run}/supervisor"


def render(spec: SupervisorSpec) -> str:
    """Return the batch script, byte for byte, that submitting hands to sbatch."""
    return _executor(spec).script()


def find(spec: SupervisorSpec) -> JobView | None:
    """Return the run's supervisor job that waits or runs.

    A job whose node died is completing for a while before Slurm queues it again.

    Raises:
        SlurmUnavailable: It is not known whether there is one.
        SlurmRefused: Slurm does not say.
    """
    until = time.monotonic() + SETTLE_S
    while True:
        ours = [
            job
            for job in jobs_named(spec.job_name)
            if job.comment == spec.comment and job.workdir == str(spec.folder)
        ]
        for job in ours:
            if job.fate in (JobFate.PENDING, JobFate.RUNNING):
                return job
        if all(job.state is not SlurmJobState.COMPLETING for job in ours):
            return None
        if time.monotonic() >= until:
            raise SlurmUnavailable(f"job {ours[-1].job} is still completing")
        time.sleep(POLL_S)


def submit(spec: SupervisorSpec, prepare: Callable[[], None]) -> tuple[JobView | None, str]:
    """Submit the job unless there is one.

    Args:
        spec: What to submit; its folder exists.
        prepare: Called before a new job is made, with nobody else about to make one.

    Returns:
        The job that was there, None for none, and the id of the one that is there now.

    Raises:
        SlurmUnavailable: It is not known whether there is one now; submitting again is safe.
        SlurmRefused: There is none.
    """
    with (spec.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = find(spec)
        if found is not None:
            return found, found.job
        prepare()
        try:
            return None, _submit_in_child(spec, lock.fileno())
        except (SlurmUnavailable, SlurmRefused):
            accepted = find(spec)  # Slurm may have taken it and not said so
            if accepted is None:
                raise
            return None, accepted.job


def requeue(job: str) -> None:
    """Have Slurm end the job, this one included, and start it again.

    Raises:
        SlurmUnavailable: No answer.
        SlurmRefused: Slurm will not.
    """
    ask(["scontrol", "requeue", job])


def _submit_in_child(spec: SupervisorSpec, lock: int) -> str:
    request = {**asdict(spec), "folder": str(spec.folder)}
    log, export = spec.folder / "submit.log", spec.options.export
    # It holds the lock for as long as anybody may still call sbatch.
    submit_in_child(__name__, request, log, export=export, keep=(lock,))
    return str(note_of(spec.folder)["job"])


def _parameters(spec: SupervisorSpec) -> dict[str, Any]:
    """Return the whole request in submitit's words. Pure.

    There is no srun and so no step. Seen with Slurm 22.05.8, though not every time: a node was cut
    off, its job was queued again and ran elsewhere, and the node came back. Slurm ended the stale
    step there; the stale srun then had Slurm cancel step N.0, which by then was that of the second
    start, and the job was over. The end of a stale batch script Slurm refuses, as it comes from the
    wrong node.
    """
    common = spec.options.parameters(spec.folder, PICKLE, spec.exclude, requeue=True)
    # `B:` is the batch script, which is then the supervisor; without it only steps are told.
    more = {**common["additional_parameters"], "signal": f"B:USR2@{WARN_S}"}
    return {
        **common,
        "additional_parameters": more,
        "use_srun": False,
        "job_name": spec.job_name,
        "comment": spec.comment,
        "nodes": 1,
        "stderr_to_stdout": True,
    }


def _executor(spec: SupervisorSpec) -> "Executor":
    from orchestrator.launch.slurm_executor import Executor

    return Executor(spec.folder, _parameters(spec))


def main() -> None:
    """Be the child: submit what standard input says, and note the job's id."""
    raw = request_given()
    options = SlurmOptions(**raw.pop("options"))
    spec = SupervisorSpec(**{**raw, "folder": Path(raw["folder"]), "options": options})
    with told_by_exit():
        spec = replace(spec, exclude=known_to_slurm(spec.exclude))
        job = _executor(spec).hand_over(PICKLE, spec.entry, str(spec.folder))
    write_note(spec.folder, {"job": job})


if __name__ == "__main__":
    main()
