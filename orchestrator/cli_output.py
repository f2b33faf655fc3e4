"""How every command prints: one JSON object, or what a view makes of it."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def show(
    body: dict[str, Any], view: "Callable[[dict[str, Any]], RenderableType]", as_json: bool
) -> None:
    """Print a body as it is, or as a person reads it."""
    if as_json:
        typer.echo(json.dumps(body, indent=2, allow_nan=False))
    else:
        console().print(view(body))


def console(stderr: bool = False) -> "Console":
    """Return a console without markup and highlighting: what others wrote is shown as it is."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)
