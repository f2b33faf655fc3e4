"""`everstep nodes`: what is known of nodes beyond one run, and what a person says about them."""

import json
import math
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator import cli_output
from orchestrator.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.ledger import Entry
    from orchestrator.core.policy import Policy
    from orchestrator.ledger import Ledger

NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
MAX_HOURS = 24.0 * 365
SHOWN_NODES = 20

nodes_app = typer.Typer(
    help="Show what is known of nodes, and take nodes away from all runs or give them back.",
    no_args_is_help=True,
)

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="A node's name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Where = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="The directory of the runs, or a run.toml.")
]
RUNS = Path("runs")


@nodes_app.command("ls")
def list_nodes(where: Where = RUNS, as_json: AsJson = False) -> None:
    """List all nodes that something is known of: state, incidents of 30 days, last fault."""
    from orchestrator.views.node_tables import nodes_view
    from orchestrator.views.nodes import overview

    ledger, policy = _find(where)
    body = overview(ledger.entries(), time.time(), policy)
    cli_output.show({**_about(ledger), **body}, nodes_view, as_json)


@nodes_app.command()
def why(node: NodeArgument, where: Where = RUNS, as_json: AsJson = False) -> None:
    """Tell a node's history: every incident with its run and cause, who excluded it, and why."""
    from orchestrator.views.node_tables import node_view
    from orchestrator.views.nodes import told

    ledger, _ = _find(where)
    entries = ledger.entries()
    _known(node, entries, ledger)
    body = told(entries, node, time.time())
    cli_output.show({**_about(ledger), **body}, node_view, as_json)


@nodes_app.command()
def exclude(
    node: NodeArgument,
    reason: Annotated[str, typer.Option("--why", metavar="TEXT", help="For those after you.")] = "",
    hours: Annotated[
        float | None, typer.Option("--hours", metavar="H", help="Default: until it is included.")
    ] = None,
    where: Where = RUNS,
    as_json: AsJson = False,
) -> None:
    """Take a node away from all runs of the directory; running ones leave it within seconds."""
    from orchestrator.core.ledger import NodeExcluded

    if not NODE_NAME.fullmatch(node):
        raise ConfigError(f"{node!r}: no name of one node, as `sinfo -N` or `everstep status` has")
    if not reason.strip():
        raise ConfigError(f"--why: missing; say why no run may use {node}")
    if hours is not None and not 0 < hours <= MAX_HOURS:
        raise ConfigError(f"--hours: {hours:g}: give hours between 0 and {MAX_HOURS:g}")
    reason = _one_line("--why", reason)
    now = time.time()
    until = math.inf if hours is None else now + hours * 3600
    ledger, _ = _find(where)
    ledger.note(NodeExcluded(at=now, node=node, by=_person(), why=reason, until=until))
    _tell(node, ledger, as_json, "running runs leave it within seconds")


@nodes_app.command()
def include(
    node: NodeArgument,
    reason: Annotated[str, typer.Option("--why", metavar="TEXT", help="What was done.")] = "",
    where: Where = RUNS,
    as_json: AsJson = False,
) -> None:
    """Give a node back to all runs; ends every exclusion of it, also those made by runs."""
    from orchestrator.core.ledger import NodeIncluded

    reason = _one_line("--why", reason)
    ledger, _ = _find(where)
    _known(node, ledger.entries(), ledger)
    ledger.note(NodeIncluded(at=time.time(), node=node, by=_person(), why=reason))
    _tell(node, ledger, as_json, "runs may use it again")


def _find(where: Path) -> "tuple[Ledger, Policy]":
    """Return the ledger, and the limits of the run file or else the usual ones."""
    from orchestrator.core.policy import Policy
    from orchestrator.ledger import FILE_NAME, Ledger, ledger_of

    if where.suffix == ".toml" and not where.is_dir():
        from orchestrator.config import load

        config = load(where)
        ledger, policy = ledger_of(config), config.policy()
    else:
        ledger, policy = Ledger(where / FILE_NAME), Policy(budget={})
        is_one_run = (where / "journal.jsonl").exists()
        if is_one_run and not ledger.path.exists():  # only a local run has its own
            ledger = Ledger(where.resolve().parent / FILE_NAME)
    if not ledger.path.parent.is_dir():
        raise NotFound(
            f"{ledger.path.parent}: no directory of runs; give --dir DIR or --dir RUN.TOML"
        )
    return ledger, policy


def _known(node: str, entries: "Sequence[Entry]", ledger: "Ledger") -> None:
    from orchestrator.core.ledger import nodes
    from orchestrator.views.nodes import natural

    known = sorted(nodes(entries), key=natural)
    if node in known:
        return
    more = f" and {len(known) - SHOWN_NODES} more" if len(known) > SHOWN_NODES else ""
    names = ", ".join(known[:SHOWN_NODES]) + more if known else "no node"
    raise NotFound(f"{node}: {ledger.path} says nothing of it; it knows {names}")


def _one_line(option: str, text: str) -> str:
    from orchestrator.ledger import TEXT_MAX

    text = " ".join(text.split())
    if len(text) > TEXT_MAX or not text.isprintable():
        raise ConfigError(f"{option}: give at most {TEXT_MAX} printable characters")
    return text


def _person() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in containers
        return f"uid {os.getuid()}"


def _about(ledger: "Ledger") -> dict[str, Any]:
    return {"ledger": str(ledger.path), "skipped_lines": ledger.skipped}


def _tell(node: str, ledger: "Ledger", as_json: bool, then: str) -> None:
    """Say what holds for a node now, as the ledger has it."""
    from orchestrator.views.node_tables import state_words
    from orchestrator.views.nodes import told

    body = told(ledger.entries(), node, time.time())
    if as_json:
        typer.echo(json.dumps({**_about(ledger), **body}, indent=2, allow_nan=False))
        return
    typer.echo(f"{node}: {state_words(body)}; {then}")
