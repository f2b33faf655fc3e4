"""One allocation through submitit's Slurm executor, never two; run in the child of `submit`.

Slurm may accept a job although sbatch failed or was killed. So the job is looked for by name,
comment and working directory before it is submitted, and again when that failed. A job found so
has nobody who would give it submitit's pickle under its number: its own batch script does.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.launch.folders import folder_of
from orchestrator.launch.launcher import AllocationSpec
from orchestrator.launch.slurm_commands import (
    SlurmRefused,
    SlurmUnavailable,
    jobs_named,
    known_to_slurm,
)
from orchestrator.launch.slurm_options import SlurmOptions
from orchestrator.launch.slurm_text import JobFate

if TYPE_CHECKING:
    from orchestrator.launch.slurm_executor import Executor

PICKLE = "agent.pkl"
# The loss of a node ends nothing but what ran there, and no site's default binds the whole node's
# ranks to the one core that their agent's task would get.
SRUN_ARGS = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none")


def request_of(spec: AllocationSpec, options: SlurmOptions) -> dict[str, Any]:
    """Return all that the submitting child must know, as plain JSON. Pure."""
    return {
        "cluster": "slurm",
        "folder": str(folder_of(spec)),
        "key": spec.key,
        "name": spec.name,
        "nodes": spec.nodes,
        "gpus_per_node": spec.gpus_per_node,
        "exclude": spec.exclude,
        "run_dir": str(spec.run_dir.absolute()),
        "entry": spec.entry,
        "slurm": asdict(options),
    }


def render(spec: AllocationSpec, options: SlurmOptions) -> str:
    """Return the batch script, byte for byte, that submitting `spec` hands to sbatch.

    Nothing is started, written or asked, and no Slurm needs to be here. The paths in it are those
    of this machine: its Python, and the folder below `spec.run_dir`.

    Args:
        spec: As `Launcher.submit` gets it; the first one of a run has the key
            `f"{name}/0/launch/1"`, excludes what the ledger does, and asks for world and spares.
        options: `config.slurm.plain()`.
    """
    folder = folder_of(spec)
    return _executor(folder, request_of(spec, options), options).script()


def submit_once(folder: Path, request: dict[str, Any]) -> str:
    """Return the id of the request's job, found or new.

    Raises:
        SlurmUnavailable: It is not known whether there is one; ask again.
        SlurmRefused: There is none and will be none.
    """
    options = SlurmOptions(**request["slurm"])
    found = find(folder, request)
    if found:
        return found
    request = {**request, "exclude": known_to_slurm(request["exclude"])}
    try:
        return _submit(folder, request, options)
    except (SlurmUnavailable, SlurmRefused):
        found = find(folder, request)
        if found:
            return found
        raise


def find(folder: Path, request: dict[str, Any]) -> str:
    """Return the id of a job that waits or runs for this request, "" for none."""
    for job in jobs_named(job_name(request["name"])):
        lives = job.fate in (JobFate.PENDING, JobFate.RUNNING)
        if lives and job.comment == request["key"] and job.workdir == str(folder):
            return job.job
    return ""


def job_name(run: str) -> str:
    """Return the job's name for a run."""
    return f"everstep-{run}"


def parameters(folder: Path, request: dict[str, Any], options: SlurmOptions) -> dict[str, Any]:
    """Return the whole request in submitit's words. Pure."""
    gpus = request["gpus_per_node"]
    return {
        **options.parameters(folder, PICKLE, request["exclude"], no_kill=True, no_requeue=True),
        **({"gpus_per_node": gpus} if gpus else {}),
        "job_name": job_name(request["name"]),
        "comment": request["key"],
        "nodes": request["nodes"],
        "signal_delay_s": options.warn_s,
        "srun_args": list(SRUN_ARGS),
    }


def _executor(folder: Path, request: dict[str, Any], options: SlurmOptions) -> "Executor":
    from orchestrator.launch.slurm_executor import Executor

    return Executor(folder, parameters(folder, request, options))


def _submit(folder: Path, request: dict[str, Any], options: SlurmOptions) -> str:
    executor = _executor(folder, request, options)
    return executor.hand_over(PICKLE, request["entry"], request["run_dir"])
