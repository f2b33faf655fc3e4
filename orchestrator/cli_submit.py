"""Commands and texts for a supervisor that is a job or a standby."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from orchestrator.supervisor.lease import Holder


def submit(
    config: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run's file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Submit the supervisor itself as a small Slurm job, which submits the run."""
    from orchestrator import submission

    done = submission.submit(config)
    if as_json:
        body = dataclasses.asdict(done)
        typer.echo(json.dumps({**body, "run_dir": str(done.run_dir), "log": str(done.log)}))
        return
    if done.found:
        typer.echo(f"job {done.job} supervises {done.run_dir.name} already ({done.found})")
    else:
        typer.echo(f"submitted job {done.job} ({done.job_name})")
    if done.waits_for:
        typer.echo(f"  it waits for the supervisor that is there now ({done.waits_for})")
    typer.echo(
        f"  status  everstep status {done.run_dir}\n"
        f"  log     tail -F {done.log}\n"
        f"  stop    everstep stop {done.run_dir}   (the ranks save and leave, the run ends)\n"
        f"  cancel  scancel {done.job}   (ends the supervisor only; submit again to go on)"
    )


def show_scripts(config: Path, as_json: bool) -> None:
    """Print what sbatch would get, and the names of the variables that go along."""
    from orchestrator import submission

    shown = submission.scripts(config)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(shown), indent=2))
        return
    typer.echo(f"==== allocation, submitted by the supervisor\n{shown.allocation}")
    typer.echo(f"==== supervisor, submitted by `everstep submit`\n{shown.supervisor}")
    typer.echo("==== variables that go along, as they are set where it is submitted")
    typer.echo("\n".join(shown.variables))


def say_standing_by(config: Path, holder: "Holder") -> None:
    """Say who has the lease that is waited for."""
    text = f"everstep: standing by for {config}: supervised by {holder.where}"
    typer.echo(f"{text}, lease {holder.epoch}", err=True)
