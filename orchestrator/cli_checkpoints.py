"""`everstep checkpoints`: what a run has in its store, whether it is sound, and what to do with it.

A run is given as everywhere, or without its directory by `--store URL --run NAME`.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from orchestrator import cli_output
from orchestrator.errors import CheckpointDamaged, ConfigError
from orchestrator.exit_codes import ExitCode

if TYPE_CHECKING:
    from orchestrator.catalogue import Target

checkpoints_app = typer.Typer(
    help="List, check, compare, prune, export and average the checkpoints of a run.",
    no_args_is_help=True,
)

RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="A run's name, its directory or its run.toml."),
]
Url = Annotated[
    str | None, typer.Option("--store", metavar="URL", help="Instead of RUN, with --run.")
]
Name = Annotated[str | None, typer.Option("--run", metavar="NAME", help="The run in that store.")]
Endpoint = Annotated[str | None, typer.Option("--endpoint-url", metavar="URL", help="Of S3.")]
Region = Annotated[str | None, typer.Option("--region", metavar="NAME", help="Of S3.")]
Step = Annotated[
    str | None,
    typer.Option("--step", metavar="STEP[/ATTEMPT]", help="Default: the newest usable one."),
]
Average = Annotated[
    str | None, typer.Option("--average", metavar="LABEL", help="An average instead.")
]
Subtree = Annotated[str, typer.Option("--subtree", metavar="PATH", help="This part of the state.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@checkpoints_app.command("ls")
def list_checkpoints(
    run: RunArgument = None,
    last: Annotated[int, typer.Option("--last", metavar="N", help="The newest N.")] = 30,
    url: Url = None,
    name: Name = None,
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """List checkpoints, newest first, those in quarantine too, and averages."""
    from orchestrator.catalogue import listing
    from orchestrator.views.checkpoint_tables import listing_view

    _at_least("--last", last, 1)
    cli_output.show(listing(_target(run, url, name, endpoint, region), last), listing_view, as_json)


@checkpoints_app.command()
def show(
    run: RunArgument = None,
    step: Step = None,
    average: Average = None,
    url: Url = None,
    name: Name = None,
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Tell what a checkpoint holds: groups, tensors, Python values."""
    from orchestrator.catalogue import description, pick
    from orchestrator.views.checkpoint_tables import description_view

    target = _target(run, url, name, endpoint, region, average)
    cli_output.show(description(target, pick(target, step)), description_view, as_json)


@checkpoints_app.command()
def verify(
    run: RunArgument = None,
    step: Step = None,
    everything: Annotated[bool, typer.Option("--all", help="Every checkpoint.")] = False,
    average: Average = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Keep a damaged one from being restored.")
    ] = False,
    url: Url = None,
    name: Name = None,
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte, check all sums, and name what is broken; exit code 8 for damage."""
    from orchestrator.checking import check_all
    from orchestrator.views.checkpoint_tables import verified_view

    if everything and step is not None:
        raise ConfigError("--all: give either --all or --step")
    target = _target(run, url, name, endpoint, region, average)
    body = check_all(target, step, everything=everything, quarantines=quarantine)
    cli_output.show(body, verified_view, as_json)
    if damaged := [c for c in body["checkpoints"] if c["problems"]]:
        raise CheckpointDamaged(f"{target.run}: {len(damaged)} damaged, named above")


@checkpoints_app.command()
def diff(
    run: RunArgument = None,
    steps: Annotated[
        tuple[str, str] | None,
        typer.Option("--steps", metavar="A B", help="Default: the newest two."),
    ] = None,
    subtree: Subtree = "",
    url: Url = None,
    name: Name = None,
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor; exit code 7 when they differ."""
    from orchestrator.checking import differences
    from orchestrator.views.checkpoint_tables import differences_view

    body = differences(_target(run, url, name, endpoint, region), steps, subtree)
    cli_output.show(body, differences_view, as_json)
    if body["tensors"] or body["values"]:
        raise typer.Exit(int(ExitCode.DIFFERENT))


@checkpoints_app.command()
def prune(
    run: RunArgument = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="K", help="The newest; 3.")
    ] = None,
    every_steps: Annotated[
        int | None, typer.Option("--keep-every", metavar="STEPS", help="The first of so many; 0.")
    ] = None,
    ages_h: Annotated[
        float | None,
        typer.Option("--ages-h", metavar="H", help="Of the last H hours, 2 H, 4 H, ...; 1."),
    ] = None,
    average_last: Annotated[
        int | None, typer.Option("--average-last", metavar="N", help="So many for an average; 6")
    ] = None,
    average_steps: Annotated[
        int | None, typer.Option("--average-every", metavar="STEPS", help="each so many steps; 0")
    ] = None,
    average_tokens: Annotated[
        int | None, typer.Option("--average-every-tokens", metavar="N", help="or tokens apart; 0.")
    ] = None,
    tokens_per_step: Annotated[
        int, typer.Option("--tokens-per-step", metavar="N", help="0: as checkpoints tell.")
    ] = 0,
    orphans_h: Annotated[
        float, typer.Option("--orphans-h", metavar="H", help="Age of orphans; 0: leave them.")
    ] = 24.0,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it this only tells.")] = False,
    url: Url = None,
    name: Name = None,
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Tell which checkpoints no rule keeps and what never became one; delete them with --yes.

    The rules are the options given, else those of RUN's table checkpoint.keep, else the defaults.
    """
    from orchestrator.pruning import carry_out, plan, rules
    from orchestrator.views.checkpoint_tables import pruning_view

    for option, hours in (("--ages-h", ages_h or 0.0), ("--orphans-h", orphans_h)):
        if not (math.isfinite(hours) and hours >= 0):
            raise ConfigError(f"{option}: {hours:g}: give 0 or more hours")
    target = _target(run, url, name, endpoint, region)
    policy = rules(
        target,
        keep_last=keep_last,
        every_steps=every_steps,
        ages_s=None if ages_h is None else ages_h * 3600,
        average_last=average_last,
        average_every_steps=average_steps,
        average_every_tokens=average_tokens,
    )
    older_than_s = orphans_h * 3600 if orphans_h else None
    body, swept = plan(
        target, policy, tokens_per_step=tokens_per_step, orphans_older_than_s=older_than_s
    )
    if yes:
        body = carry_out(target, body, swept)
    cli_output.show(body, pruning_view, as_json)


@checkpoints_app.command()
def export(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="A folder that is not there.")],
    run: RunArgument = None,
    step: Step = None,
    average: Average = None,
    form: Annotated[
        Literal["safetensors", "dcp"], typer.Option("--format", help="What to write.")
    ] = "safetensors",
    subtree: Annotated[
        str | None,
        typer.Option("--subtree", metavar="PATH", help="Default: model; for dcp everything."),
    ] = None,
    strip: Annotated[
        str, typer.Option("--strip", metavar="TEXT", help="Take off names, such as `module.`.")
    ] = "",
    shard_gb: Annotated[
        float, typer.Option("--shard-gb", metavar="GB", help="Most of one file, in 1e9 bytes.")
    ] = 5.0,
    url: Url = None,
    name: Name = None,
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as other programs read it; every byte is verified on the way."""
    from orchestrator.checking import exported
    from orchestrator.views.checkpoint_tables import exported_view

    if not 0 < shard_gb < 1e9:
        raise ConfigError(f"--shard-gb: {shard_gb:g}: give more than 0")
    if form == "dcp" and strip:
        raise ConfigError("--strip: only for safetensors; a dcp folder keeps the state's own names")
    target = _target(run, url, name, endpoint, region, average)
    body = exported(
        target, step, to, form=form, subtree=subtree, strip=strip, shard_bytes=int(shard_gb * 1e9)
    )
    cli_output.show(body, exported_view, as_json)


@checkpoints_app.command()
def average(
    run: RunArgument = None,
    last: Annotated[int, typer.Option("--last", metavar="N", help="Of the newest N steps.")] = 6,
    label: Annotated[
        str | None, typer.Option("--label", metavar="NAME", help="Default: last-N.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="TYPE", help="Default: as each is stored.")
    ] = None,
    subtree: Subtree = "model",
    scratch: Annotated[
        Path | None, typer.Option("--scratch", metavar="DIR", help="Room for the result.")
    ] = None,
    url: Url = None,
    name: Name = None,
    endpoint: Endpoint = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Average the weights of the newest checkpoints; nothing ever resumes from the result."""
    from orchestrator.checking import averaged
    from orchestrator.views.checkpoint_tables import averaged_view

    _at_least("--last", last, 1)
    target = _target(run, url, name, endpoint, region)
    body = averaged(target, last, label, dtype=dtype, subtree=subtree, scratch=scratch)
    cli_output.show(body, averaged_view, as_json)


def _target(
    run: str | None,
    url: str | None,
    name: str | None,
    endpoint: str | None,
    region: str | None,
    label: str | None = None,
) -> "Target":
    from orchestrator.catalogue import of_average, open_target

    target = open_target(run, url, name, endpoint, region)
    return target if label is None else of_average(target, label)


def _at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{option}: {value}: give at least {least}")
