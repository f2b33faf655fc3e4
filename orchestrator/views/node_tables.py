"""`everstep nodes` as terminal text; takes the JSON objects of `orchestrator.views.nodes`."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.views.tables import grid
from orchestrator.views.units import NOT_MEASURED, count, date, seconds

MOOD = {"ok": "green", "excluded": "yellow"}
LAST_DATE = 2.5e11  # Unix time shortly before the year 9999, the last one that has a name


def nodes_view(body: dict[str, Any]) -> RenderableType:
    """Render `everstep nodes ls`."""
    parts: list[RenderableType] = [Text("nothing is known of any node yet", style="dim")]
    if body["nodes"]:
        parts = [_nodes_table(body["nodes"])]
    return Group(*parts, "", breaker_line(body["breaker"]), *_skipped(body))


def _nodes_table(nodes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("node", "state", "incidents, 30 d", "last fault", "why"):
        table.add_column(column, overflow="fold")
    table.columns[2].justify = "right"
    for node in nodes:
        table.add_row(
            node["name"],
            Text(state_words(node), style=MOOD[node["state"]]),
            str(node["incidents_30d"]),
            node["last_fault"] or NOT_MEASURED,
            node["why"] or NOT_MEASURED,
        )
    return table


def state_words(node: dict[str, Any]) -> str:
    """Say whether runs may use a node, and if not, until when and who says so."""
    if node["state"] == "ok":
        return "ok"
    return f"excluded {until_words(node['until'])} by {node['who']}"


def until_words(until: float | None) -> str:
    """Say when an exclusion ends; None: only when a person ends it."""
    return "until included" if until is None else f"until {_date(until)}"


def breaker_line(breaker: dict[str, Any]) -> Text:
    """Say how many nodes runs have excluded, and whether they may go on with that."""
    nodes, limit = breaker["nodes"], breaker["limit"]
    hours = breaker["window_s"] / 3600
    lately = f"{count(len(nodes), 'node')} excluded by runs in the last {hours:g} h"
    if not breaker["open"]:
        return Text(f"{lately}; at {limit} the breaker opens", style="dim")
    cure = "; look at them, then include or exclude each" if nodes else ""
    text = f"breaker open: {lately}, limit {limit}: runs exclude no further node by themselves"
    return Text(text + cure, style="bold red")


def node_view(body: dict[str, Any]) -> RenderableType:
    """Render `everstep nodes why`."""
    words = Text(state_words(body), style=MOOD[body["state"]])
    rows: list[tuple[str, RenderableType]] = [("node", Text(body["node"], style="bold"))]
    rows.append(("state", words))
    if body["why"]:
        rows.append(("why", Text(body["why"])))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for line in body["history"]:
        table.add_row(_date(line["at"]), history_words(line))
    return Group(grid(rows), "", table, *_skipped(body))


def history_words(line: dict[str, Any]) -> Text:
    """Say what was written about a node."""
    if line["what"] == "incident":
        head = f"incident {line['incident']} of run {line['run']}: {line['fault']}"
        if line["excluded_s"] is None:
            head += "; excluded until included"
        elif line["excluded_s"] > 0:
            head += f"; excluded for {seconds(line['excluded_s'])}"
        return Text.assemble((head, "bold"), "\n", line["cause"])
    head = f"{line['what']} by {line['by']}"
    if line["what"] == "excluded":
        head += f" {until_words(line['until'])}"
    return Text.assemble((head, "bold"), *(("\n", line["why"]) if line["why"] else ()))


def _skipped(body: dict[str, Any]) -> list[RenderableType]:
    """Say that the file has lines that nobody could read."""
    if not body["skipped_lines"]:
        return []
    lines = count(body["skipped_lines"], "line")
    text = f"{lines} of {body['ledger']} could not be read and did not count"
    return ["", Text(text, style="yellow")]


def _date(at: float) -> str:
    return date(at) if 0 <= at < LAST_DATE else NOT_MEASURED
