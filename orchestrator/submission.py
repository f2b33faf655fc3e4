"""`everstep submit`: the supervisor as a job of its own, and what sbatch gets."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.address import with_address
from orchestrator.app import finished, outcome_of, read, state_in
from orchestrator.config import RunConfig, freeze
from orchestrator.config_sections import AUTO
from orchestrator.core.actions import Outcome
from orchestrator.core.ledger import excluded
from orchestrator.errors import ConfigError, PreconditionError
from orchestrator.launch import slurm_submit, slurm_supervisor
from orchestrator.launch.launcher import AllocationSpec
from orchestrator.launch.slurm_commands import SlurmRefused, SlurmUnavailable, allowed
from orchestrator.launch.slurm_supervisor import FROZEN, LOG, SupervisorSpec
from orchestrator.ledger import FILE_NAME, Ledger
from orchestrator.preflight import preflight
from orchestrator.supervisor.lease import current_holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The job that supervises a run.

    Attributes:
        job: Its id.
        job_name: Its name in Slurm.
        run_dir: The run's directory.
        log: What the supervisor says.
        found: State and nodes of a job that was there already, "" for a new one.
        waits_for: Whose lease it waits for, "" when nobody supervises the run.
    """

    job: str
    job_name: str
    run_dir: Path
    log: Path
    found: str
    waits_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripts:
    """What sbatch gets.

    Attributes:
        allocation: The batch script of the run's first allocation.
        supervisor: That of the supervisor's job.
        variables: Names of the variables that go along with both.
    """

    allocation: str
    supervisor: str
    variables: tuple[str, ...]


def submit(config_path: Path) -> Submitted:
    """Submit the run's supervisor, unless its job waits or runs already.

    Raises:
        EverstepError: It is not submitted, or it is not known whether; submitting again is safe.
    """
    config = _on_slurm(config_path)
    if config.server.host != AUTO:
        raise ConfigError(
            f"server.host: {config.server.host} is wrong on whatever node the supervisor gets; "
            'write "auto", or remove it'
        )
    preflight(with_address(config))
    run_dir = config.run_dir.resolve()
    if outcome_of(run_dir) is Outcome.FINISHED:
        raise finished(config)
    spec = _supervisor_spec(config)
    spec.folder.mkdir(parents=True, exist_ok=True)
    try:
        found, job = slurm_supervisor.submit(spec, lambda: freeze(config, spec.folder / FROZEN))
    except SlurmRefused as error:
        raise PreconditionError(f"Slurm refuses the supervisor's job: {error}") from error
    except SlurmUnavailable as error:
        text = f"Slurm does not answer ({error}); submit again, that never makes a second job"
        raise PreconditionError(text) from error
    about = ""
    if found is not None:
        about = " ".join(filter(None, (found.state.lower(), *found.nodes, found.reason)))
    holder = current_holder(run_dir / "lease")
    is_held = found is None and holder is not None and not holder.is_dead
    return Submitted(
        job=job,
        job_name=spec.job_name,
        run_dir=run_dir,
        log=run_dir / LOG,
        found=about,
        waits_for=holder.where if is_held and holder is not None else "",
    )


def scripts(config_path: Path) -> Scripts:
    """Return what would be submitted; needs no Slurm and starts nothing."""
    config = _on_slurm(config_path)
    return Scripts(
        allocation=slurm_submit.render(_allocation_spec(config), config.slurm.plain()),
        supervisor=slurm_supervisor.render(_supervisor_spec(config)),
        variables=tuple(sorted(allowed(os.environ, config.slurm.export))),
    )


def _on_slurm(config_path: Path) -> RunConfig:
    config = read(config_path)
    if config.nodes.launcher != "slurm":
        raise ConfigError(
            f'nodes.launcher: {config.nodes.launcher} submits nothing; write "slurm", or use '
            "`everstep run`"
        )
    return config


def _supervisor_spec(config: RunConfig) -> SupervisorSpec:
    return SupervisorSpec(
        run=config.run.name,
        folder=config.run_dir.resolve() / "supervisor",
        options=config.slurm.plain_supervisor(),
        exclude=_excluded(config),
    )


def _allocation_spec(config: RunConfig) -> AllocationSpec:
    name = config.run.name
    return AllocationSpec(
        key=f"{name}/{state_in(config.run_dir).last_attempt}/launch/1",
        name=name,
        nodes=config.nodes.count + config.nodes.spares,
        gpus_per_node=config.nodes.gpus_per_node,
        run_dir=config.run_dir,
        exclude=_excluded(config),
    )


def _excluded(config: RunConfig) -> tuple[str, ...]:
    """Return the nodes that no run is to get now."""
    entries = Ledger(config.run.dir / FILE_NAME).entries()
    return tuple(sorted(excluded(entries, time.time())))
