"""The views as terminal text, with rich. They take the JSON objects of the other views."""

from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from orchestrator.views.folders import failure_words, last_words
from orchestrator.views.goodput import Use
from orchestrator.views.incidents import PHASES, lost_cell, phase_cells
from orchestrator.views.palette import COLOR, LABEL
from orchestrator.views.parts import covers_words
from orchestrator.views.saves import cost_words, missed_words, retry_words
from orchestrator.views.units import (
    NOT_MEASURED,
    clock,
    count,
    number,
    percent,
    rate,
    seconds,
)

BAR_WIDTH = 60
TABLE_WIDTH = 124
CHECKED = ("run", "command", "nodes", "store", "saves", "keeps")
MOOD = {"running": "green", "finished": "green", "failed": "red", "over": "blue"}
NODE_MOOD = {
    "training": "green",
    "spare": "blue",
    "lost": "red",
    "excluded": "yellow",
    "leaving": "yellow",
    "unfit": "red",
}


def grid(rows: list[tuple[str, RenderableType]]) -> Table:
    """Lay out names and values in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def status_view(status: dict[str, Any]) -> RenderableType:
    """Render `everstep status`."""
    parts: list[RenderableType] = [title_line(status)]
    if status["phase"] != "over" and status["supervisor"].get("alive") is False:
        text = "no supervisor answers: below is what the last one knew; `everstep run` takes it up"
        parts.append(Text(text, style="red"))
    parts += [Text(status["headline"], style="dim"), ""]
    parts.append(grid(status_rows(status)))
    if status["nodes"]:
        parts += ["", nodes_table(status["nodes"])]
    if status["incidents"]:
        parts += ["", incidents_view(status["incidents"])]
    return Group(*parts)


def title_line(status: dict[str, Any]) -> Text:
    """Render the run's name and phase."""
    word = status["outcome"] or status["phase"]
    name = Text(status["run"] or "no run", style="bold")
    return Text.assemble(name, "  ", (word, f"bold {MOOD.get(word, 'yellow')}"))


def covers_rows(body: dict[str, Any]) -> list[tuple[str, RenderableType]]:
    """Say first what is left out of everything below, if anything is."""
    words = covers_words(body)
    return [("covers", Text(words, style="yellow"))] if words else []


def status_rows(status: dict[str, Any]) -> list[tuple[str, RenderableType]]:
    """Render the facts of a status, one per line."""
    progress, saves, attempt = status["progress"], status["checkpoints"], status["attempt"]
    goodput, supervisor = status["goodput"], status["supervisor"]
    rows: list[tuple[str, RenderableType]] = covers_rows(status)
    rows.append(("progress", progress_words(progress)))
    if attempt is not None:
        rows.append(("attempt", attempt_words(attempt)))
    rows.append(("checkpoint", checkpoint_words(saves)))
    if saves["enabled"]:
        every = f"every {count(saves['interval_steps'], 'step')}: {saves['interval_why']}"
        rows.append(("interval", every))
    rows += save_rows(saves)
    rows += folder_rows(status)
    if saves["copies_failing"]:
        rows.append(("copies fail", Text(saves["copies_failing"], style="yellow")))
    if saves["problem"]:
        rows.append(("problem", Text(saves["problem"], style="yellow")))
    spent = f"{percent(goodput['ratio'])} of {seconds(goodput['wall_s'])}"
    rows.append(("goodput", spent))
    left = ", ".join(map(_budget_words, status["budget"]))
    rows.append(("restarts left", left or "no bound"))
    if status["breaker_open"]:
        text = "too many nodes were excluded lately: none is excluded any more; see everstep nodes"
        rows.append(("breaker", Text(text, style="yellow")))
    rows += [("allocation", allocation_words(a)) for a in status["allocations"] if a["job"]]
    words = {True: "answers", False: "does not answer", None: ""}
    alive = "" if status["phase"] == "over" else words[supervisor.get("alive")]
    where = [supervisor["holder"], f"lease {supervisor['epoch']}", supervisor.get("url"), alive]
    rows.append(("supervisor", ", ".join(str(part) for part in where if part)))
    return rows


def _budget_words(budget: dict[str, Any]) -> str:
    """Say what is left; what a checkpoint after it made good does not count any more."""
    words = f"{budget['left']} of {budget['allowed']} {budget['class']}"
    return f"{words} ({budget['forgiven']} forgiven)" if budget["forgiven"] else words


def progress_words(progress: dict[str, Any]) -> str:
    """Say where training is."""
    if progress["step"] is None:
        return "no step yet"
    words = [f"step {progress['step']:,}"]
    if progress["loss"] is not None:
        words.append(f"loss {number(progress['loss'])}")
    if progress["step_s"] is not None:
        words.append(f"{seconds(progress['step_s'])} a step")
    if progress["tokens_per_s"] is not None:
        words.append(f"{rate(progress['tokens_per_s'])} tokens".replace("/s tokens", " tokens/s"))
    if progress["last_step_age_s"] is not None:
        words.append(f"{seconds(progress['last_step_age_s'])} ago")
    return ", ".join(words)


def allocation_words(allocation: dict[str, Any]) -> str:
    """Say what became of an allocation."""
    words = f"{allocation['job']}, {count(allocation['nodes'], 'node')}: {allocation['state']}"
    if allocation["ending"]:
        words += f", {allocation['ending'].replace('_', ' ')}"
    return f"{words}: {allocation['why']}" if allocation["why"] else words


def attempt_words(attempt: dict[str, Any]) -> str:
    """Say which attempt runs, and where."""
    nodes = attempt["nodes"]
    where = ", ".join(nodes) if len(nodes) <= 6 else f"{nodes[0]} .. {nodes[-1]}"
    shape = f"{count(len(nodes), 'node')} x {count(attempt['ranks_per_node'], 'rank')}"
    return f"{attempt['number']}, {attempt['phase']}: {shape} on {where}"


def checkpoint_words(saves: dict[str, Any]) -> str:
    """Say what is saved."""
    if not saves["enabled"]:
        return "off: the run asked for none"
    if saves["newest_step"] is None:
        return "none committed yet"
    age = f", {seconds(saves['age_s'])} ago" if saves["age_s"] is not None else ""
    return f"step {saves['newest_step']:,}{age}, {count(saves['committed'], 'commit')} in all"


def save_rows(saves: dict[str, Any]) -> list[tuple[str, RenderableType]]:
    """Say what saving costs, and which saves came to nothing."""
    rows: list[tuple[str, RenderableType]] = []
    if words := cost_words(saves["last_save"]):
        rows.append(("last save", words))
    if words := missed_words(saves):
        rows.append(("not saved", Text(words, style="yellow")))
    return rows


def folder_rows(body: dict[str, Any]) -> list[tuple[str, RenderableType]]:
    """Say which watched folder was committed last, and what failed last."""
    if (folders := body.get("folders")) is None:
        return []
    rows: list[tuple[str, RenderableType]] = [("own folder", last_words(folders))]
    if words := failure_words(folders):
        rows.append(("not kept", Text(words, style="yellow")))
    return rows


def nodes_table(nodes: list[dict[str, Any]]) -> Table:
    """Render the nodes."""
    table = _table("node", "state", "ranks", "in memory", "why")
    for node in nodes:
        ranks = node["ranks"]
        table.add_row(
            node["name"],
            Text(node["state"], style=NODE_MOOD.get(node["state"], "")),
            f"{ranks[0]}-{ranks[-1]}" if ranks else NOT_MEASURED,
            ", ".join(f"{step:,}" for step in node["in_memory"]) or NOT_MEASURED,
            node["why"],
        )
    return table


class Incidents:
    """The table of incidents; on a narrow terminal each becomes a few lines of text."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose by the width at hand."""
        wide = options.max_width >= TABLE_WIDTH
        if wide:
            yield _incident_table(self._rows)
        else:
            yield Text("incidents", style="dim")
            yield _incident_lines(self._rows)


def incidents_view(rows: list[dict[str, Any]]) -> RenderableType:
    """Render cause, decision and reason, seconds by phase and steps lost of each incident."""
    return Incidents(rows) if rows else Text("no incidents", style="dim")


def _incident_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("#", "at", "cause", "decision and reason")
    for column in table.columns[:2]:
        column.no_wrap = True
    for _, name in PHASES:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("steps lost", justify="right", no_wrap=True)
    for row in rows:
        decision = Text.assemble((row["decision"], "bold"), ("\n" + _because(row), "dim"))
        cells = (*phase_cells(row), lost_cell(row))
        table.add_row(str(row["number"]), clock(row["at"]), row["cause"], decision, *cells)
    return table


def _incident_lines(rows: list[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for row in rows:
        cells = zip(PHASES, phase_cells(row), strict=True)
        phases = ", ".join(f"{name} {cell}" for (_, name), cell in cells)
        text = Text.assemble((row["cause"], "bold"), f"\n{row['decision']}: {_because(row)}\n")
        text.append(f"{phases}; steps lost {lost_cell(row)}", style="dim")
        table.add_row(f"{row['number']}  {clock(row['at'])}", text)
    return table


def _because(row: dict[str, Any]) -> str:
    """Leave the cause out of the reason where the table has it already."""
    return str(row["reason"]).removeprefix(row["cause"]).lstrip("; ")


def uses_view(goodput: dict[str, Any]) -> RenderableType:
    """Render where the time went as a bar and a table."""
    wall = goodput["wall_s"]
    used = [(use, goodput["seconds"][use.value]) for use in COLOR]
    used = [(use, value) for use, value in used if value > 0.0005]
    bar = Text()
    for use, value in used:
        bar.append("\u2588" * max(1, round(BAR_WIDTH * value / wall)), style=COLOR[use])
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    for use, value in used:
        name = Text.assemble(("\u25a0 ", COLOR[use]), LABEL[use])
        table.add_row(name, seconds(value), percent(value / wall))
    parts: list[RenderableType] = [bar, "", table]
    if goodput["supervisor_away_s"]:
        away = seconds(goodput["supervisor_away_s"])
        parts.append(Text(f"without a supervisor for {away} (training went on)", style="dim"))
    return Group(*parts)


def report_view(body: dict[str, Any]) -> RenderableType:
    """Render `everstep report` as text."""
    steps = sum(row["steps_lost"] or 0 for row in body["incidents"])
    productive = seconds(body["goodput"]["seconds"][Use.STEP.value])
    rows: list[tuple[str, RenderableType]] = [
        *covers_rows(body),
        ("goodput", f"{percent(body['goodput']['ratio'])}: {productive} productive"),
        ("wall time", seconds(body["goodput"]["wall_s"])),
        ("progress", progress_words({**body["progress"], "last_step_age_s": None})),
        ("checkpoint", checkpoint_words({**body["checkpoints"], "age_s": None})),
        ("incidents", f"{len(body['incidents'])}, {count(steps, 'step')} run again"),
    ]
    rows += save_rows(body["checkpoints"])
    rows += folder_rows(body)
    if retries := body["checkpoints"]["retries"]:
        rows.append(("store", retry_words(retries)))
    if "compared" in body:
        rows.append(("compared", _compared(body["compared"])))
    headline = Text(body["headline"], style="dim")
    parts: list[RenderableType] = [title_line(body), headline, "", grid(rows), ""]
    parts += [uses_view(body["goodput"]), "", incidents_view(body["incidents"])]
    return Group(*parts)


def _compared(compared: dict[str, Any]) -> str:
    gap = compared["largest_loss_difference"]
    same = "equal at every step" if gap == 0 else f"largest difference {number(gap, 6)}"
    return f"{compared['common_steps']:,} steps in common with {compared['run']}, loss: {same}"


def why_view(why: dict[str, Any]) -> RenderableType:
    """Render `everstep why`."""
    rows: list[tuple[str, RenderableType]] = [("now", Text(why["idle"]))]
    if "decision" in why:
        rows = [
            ("decision", Text(f"{why['decision']}  (record {why['seq']}, {clock(why['at'])})")),
            ("reason", why["reason"]),
            ("rule", why["rule"]),
        ]
        if why["cause"]:
            rows.append(("cause", Text(why["cause"], style="bold")))
        rows += _seen("evidence", why["evidence"]) or [("evidence", "none needed")]
        rows += _seen("what came of it", why["outcome"]) or [("what came of it", "nothing yet")]
        rows.append(("now", why["idle"]))
    for pending in why["pending"]:
        rows.append(("in hand", f"{pending['text']} (since {clock(pending['since'])})"))
    return grid(rows)


def _seen(name: str, lines: list[dict[str, Any]]) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    for k, line in enumerate(lines):
        stamp = (f"{line['seq']:>5}  {clock(line['at'])}  ", "dim")
        rows.append((name if k == 0 else "", Text.assemble(stamp, line["text"])))
    return rows


def replay_view(body: dict[str, Any]) -> RenderableType:
    """Render `everstep replay`."""
    differences = body["differences"]
    made = f"{count(body['decisions'], 'decision')} derived from {count(body['records'], 'record')}"
    if not differences:
        return Text.assemble(("the same: ", "bold green"), made)
    parts: list[RenderableType] = [
        Text.assemble((f"{count(len(differences), 'difference')}: ", "bold red"), made),
        "",
    ]
    for item in differences:
        derived = item["derived"] or {"rule": "none", "reason": "nothing would be decided"}
        rows: list[tuple[str, RenderableType]] = [
            ("record", f"{item['seq']}, {clock(item['at'])}; {', '.join(item['fields'])} differ"),
            ("journal", f"{item['stored']['rule']}: {item['stored']['reason']}"),
            ("now", f"{derived['rule']}: {derived['reason']}"),
        ]
        parts += [grid(rows), ""]
    return Group(*parts)


def check_view(body: dict[str, Any]) -> RenderableType:
    """Render `everstep check`: `run`, `nodes`, `store`, what is saved and kept, and timeouts."""
    table = _table("timeout", "value", "meaning")
    for row in body["timeouts"]:
        table.add_row(row["name"], seconds(row["seconds"]), row["meaning"])
    words = grid([(name, body[name]) for name in CHECKED])
    return Group(words, "", table, "", Text("ready to run; nothing was started", style="green"))


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
