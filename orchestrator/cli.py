"""The command line: parse, read or ask, render. Everything heavy is imported by its command."""

import json
import os
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from orchestrator import cli_output, cli_reading, cli_submit
from orchestrator.cli_checkpoints import checkpoints_app
from orchestrator.cli_nodes import nodes_app
from orchestrator.errors import ConfigError, EverstepError, PreconditionError
from orchestrator.exit_codes import MEANING, OUTCOME_CODE, ExitCode

if TYPE_CHECKING:
    from orchestrator.views.report import Report

FOLLOW_EVERY_S = 0.25
PIPE_CLOSED = 141

EPILOG = "\n".join(
    ["Exit codes:", *(f"{int(code):>5}  {meaning}" for code, meaning in MEANING.items())]
)

app = typer.Typer(
    help="Keeps long training runs stepping: supervises, restarts, saves, and says why.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(nodes_app, name="nodes")
app.add_typer(checkpoints_app, name="checkpoints")

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's name, its directory or its run.toml.")
]
ConfigArgument = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run's file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"everstep {version('everstep')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Take the options that come before a command."""


@app.command()
def run(
    config: ConfigArgument,
    plain: Annotated[bool, typer.Option("--plain", help="One line per event, for logs.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="At the end, print the report as one JSON object.")
    ] = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait while another supervisor lives, then take over.")
    ] = False,
    more: Annotated[
        bool, typer.Option("--more", help="Take up a finished run whose command wants more steps.")
    ] = False,
) -> None:
    """Supervise a run in the foreground until it is over, or take it up again."""
    from orchestrator import app as application
    from orchestrator.views.live import LiveView, PlainView

    wait = partial(cli_submit.say_standing_by, config) if standby else None
    console = cli_output.console(stderr=as_json)
    view: LiveView | PlainView
    if plain or as_json or not console.is_terminal:
        view = PlainView(lambda text: typer.echo(text, err=as_json))
    else:
        view = LiveView(console)
    try:
        with view:
            outcome = application.run(config, watcher=view.show, standby=wait, more=more)
    except KeyboardInterrupt:
        again = f"`everstep run {config}` adopts them"
        typer.echo(f"everstep: interrupted; the ranks go on, {again}", err=True)
        raise
    run_dir = application.find_run(str(config))
    _summary(run_dir, as_json)
    raise typer.Exit(int(OUTCOME_CODE[outcome.value]))


app.command()(cli_submit.submit)


def _without_values(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the names of the ranks' variables only: values may be secret."""
    return {**config, "job": {**config["job"], "env": sorted(config["job"]["env"])}}


@app.command()
def check(
    config: ConfigArgument,
    as_json: AsJson = False,
    render: Annotated[
        bool, typer.Option("--render", help="Print what sbatch would get, and check no more.")
    ] = False,
) -> None:
    """Check a run's file, its script and its store; start nothing."""
    if render:
        cli_submit.show_scripts(config, as_json)
        return
    from orchestrator import app as application
    from orchestrator.views.save_plan import keeping_words, saving_words
    from orchestrator.views.tables import check_view
    from orchestrator.views.units import count

    checked = application.check(config)
    run_, nodes = checked.config.run, checked.config.nodes
    shape = f"{count(nodes.count, 'node')} x {count(nodes.ranks_per_node, 'rank')}"
    body = {
        "run": f"{run_.name}, in {checked.config.run_dir}",
        "command": " ".join(checked.config.argv),
        "nodes": f"{shape}, {nodes.spares} spare, launcher {nodes.launcher}",
        "store": checked.store,
        "saves": saving_words(checked.config.checkpoint),
        "keeps": keeping_words(checked.config.checkpoint),
        "timeouts": [
            {"name": name, "seconds": seconds, "meaning": meaning}
            for name, seconds, meaning in checked.timeouts
        ],
        "config": _without_values(checked.config.model_dump(mode="json")),
    }
    cli_output.show(body, check_view, as_json)


@app.command()
def status(run_: RunArgument, as_json: AsJson = False) -> None:
    """Show where a run stands."""
    from orchestrator.views.status import status as make_status
    from orchestrator.views.tables import status_view

    run_dir = cli_reading.find(run_)
    state, history, _ = cli_reading.load(run_dir)
    now = state.at if state.over else max(time.time(), state.at)
    body = make_status(
        state, history, now, cli_reading.supervisor(run_dir), cli_reading.earlier(run_dir)
    )
    cli_output.show(body, status_view, as_json)


@app.command()
def why(
    run_: RunArgument,
    seq: Annotated[
        int | None, typer.Option("--seq", help="Explain the decision with this record number.")
    ] = None,
    incident: Annotated[
        int | None, typer.Option("--incident", help="Explain what was decided on this incident.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain the last decision (or a given one), and why nothing else happens."""
    from orchestrator.views import why as explaining
    from orchestrator.views.tables import why_view

    state, _, records = cli_reading.load(cli_reading.find(run_))
    record = explaining.find(state, records, seq=seq, incident=incident)
    if record is None and (seq is not None or incident is not None):
        wanted = f"--seq {seq}" if seq is not None else f"--incident {incident}"
        raise ConfigError(f"{wanted}: no such decision; see `everstep events {run_}`")
    body = explaining.explain(state, records, record) if record else explaining.idle(state)
    cli_output.show(body, why_view, as_json)


@app.command()
def events(
    run_: RunArgument,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only this kind of event; repeatable.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Show the journal in words."""
    from orchestrator.supervisor.journal import read_records
    from orchestrator.views import events as words

    wanted = kind or []
    unknown = sorted(set(wanted) - set(words.kinds()))
    if unknown:
        raise ConfigError(f"--kind {unknown[0]}: unknown; one of {', '.join(words.kinds())}")
    path = cli_reading.find(run_) / "journal.jsonl"
    shown, size = 0, -1
    while True:
        if path.stat().st_size != size:
            size = path.stat().st_size
            # One reader with one set of rules, rather than a second one for tails.
            records = read_records(path)
            for record in words.select([r for r in records if r.seq > shown], wanted):
                typer.echo(json.dumps(words.row(record)) if as_json else words.line(record))
            shown = records[-1].seq if records else shown
            if not follow or words.is_over(records):
                return
        time.sleep(FOLLOW_EVERY_S)


@app.command()
def replay(run_: RunArgument, as_json: AsJson = False) -> None:
    """Derive every decision of the journal again; exit code 7 shows a difference."""
    from orchestrator.views import replay as replaying
    from orchestrator.views.tables import replay_view

    _, _, records = cli_reading.load(cli_reading.find(run_))
    result = replaying.replay(records)
    cli_output.show(replaying.as_json(result), replay_view, as_json)
    if result.differences:
        raise typer.Exit(int(ExitCode.DIFFERENT))


@app.command()
def report(
    run_: RunArgument,
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="RUN", help="Draw this run's loss as well.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder; default: the run's own.")
    ] = None,
    png: Annotated[bool, typer.Option("--png/--no-png", help="Also draw report.png.")] = True,
    as_json: AsJson = False,
) -> None:
    """Write report.html and report.png, and print the report."""
    from orchestrator.views import report as reporting
    from orchestrator.views.losses import read_losses
    from orchestrator.views.report_html import render_html
    from orchestrator.views.tables import report_view

    run_dir = cli_reading.find(run_)
    _, _, records = cli_reading.load(run_dir)
    losses = read_losses(run_dir / "output" / "metrics.jsonl")
    other = cli_reading.reference(compare) if compare else None
    made = reporting.build(records, losses, other, cli_reading.earlier(run_dir))
    folder = output or run_dir
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "report.html"]
    written[0].write_text(render_html(made), encoding="utf-8")
    if png:
        written += _draw(made, folder / "report.png")
    cli_output.show(
        {**reporting.as_json(made), "files": [str(p) for p in written]}, report_view, as_json
    )
    if not as_json:
        typer.echo("\nwritten: " + ", ".join(str(path) for path in written))


@app.command()
def stop(run_: RunArgument) -> None:
    """Let the ranks save and leave, then end the run; it can go on later."""
    _ask(run_, "stop", "the ranks save and leave at their next step")


@app.command()
def snapshot(run_: RunArgument) -> None:
    """Save a checkpoint now, outside the interval."""
    _ask(run_, "snapshot", "all ranks save once, at a step that none of them has reached yet")


def main() -> None:
    """Run the command line; every known failure is one line and a documented exit code."""
    try:
        app()
    except EverstepError as error:
        typer.echo(f"everstep: {error}", err=True)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        sys.exit(int(ExitCode.INTERRUPTED))
    except SystemExit as end:
        # typer's own answer to a reader who left is 1: that of a run that failed.
        is_unread = isinstance(end.__context__, BrokenPipeError)
        sys.exit(PIPE_CLOSED if is_unread else end.code)
    except Exception as error:  # noqa: BLE001 - the outermost boundary: nothing may look raw
        place = _keep_traceback()
        text = f"everstep: internal error: {type(error).__name__}: {error}".splitlines()[0]
        typer.echo(f"{text}; the traceback is in {place}", err=True)
        sys.exit(int(ExitCode.INTERNAL))


def _keep_traceback() -> str:
    handle, path = tempfile.mkstemp(prefix="everstep-", suffix=".traceback")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(traceback.format_exc())
    return path


def _draw(made: "Report", path: Path) -> list[Path]:
    """Draw the picture, or say why there is none."""
    from orchestrator.views.report_png import render_png

    try:
        render_png(made, path)
    except PreconditionError as error:
        typer.echo(f"everstep: no {path.name}: {error}", err=True)
        return []
    return [path]


def _ask(name: str, what: Literal["stop", "snapshot"], then: str) -> None:
    from orchestrator.app import ask

    run_dir = cli_reading.find(name)
    ask(run_dir, what)
    typer.echo(f"asked {run_dir.name} to {what}: {then}; see `everstep status {name}`")


def _summary(run_dir: Path, as_json: bool) -> None:
    """Print what a run came to."""
    from orchestrator.views import report as reporting
    from orchestrator.views.losses import read_losses
    from orchestrator.views.tables import report_view

    _, _, records = cli_reading.load(run_dir)
    losses = read_losses(run_dir / "output" / "metrics.jsonl")
    made = reporting.build(records, losses, earlier=cli_reading.earlier(run_dir))
    cli_output.show(reporting.as_json(made), report_view, as_json)
    if made.status["outcome"] == "failed":
        typer.echo(f"everstep: failed: {made.status['outcome_reason']}", err=True)


if __name__ == "__main__":
    main()
