"""What the demo shows: the live view of `everstep run`, and at the end what it cost."""

import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.demo.run import Run
from deploy.demo.scenario import Blow
from orchestrator.core import events as ev
from orchestrator.core.actions import SetInterval
from orchestrator.views.goodput import account
from orchestrator.views.incidents import PHASES, incident_rows
from orchestrator.views.live import LiveView, PlainView
from orchestrator.views.tables import grid
from orchestrator.views.units import percent, seconds

TABLE_WIDTH = 140


class Screen:
    """The live view, which outlives the supervisors that it shows."""

    def __init__(self, *, plain: bool) -> None:
        self._console = Console(highlight=False, width=140 if plain else None)
        self._plain = plain or not self._console.is_terminal
        self._view = PlainView(self._line) if self._plain else LiveView(self._console)

    def __enter__(self) -> Self:
        """Start drawing."""
        self._view.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop drawing and give the terminal back."""
        self._view.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """Print one line that stays."""
        if self._plain:
            self._line(f"demo: {text}")
        else:
            self._console.print(Text.assemble(("demo  ", "bold magenta"), text))

    def show(self, run: Run) -> None:
        """Show a run as its journal has it now."""
        if run.fresh:
            self._view.show(run.state, run.history, run.fresh)

    def _line(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def rows_of(run: Run, blows: tuple[Blow, ...]) -> list[dict[str, Any]]:
    """Return one row per thing that was done, with what came of it.

    How long it took to notice is counted from the demo's own clock, not from the first witness.
    """
    rows = []
    for blow, row in zip(blows, incident_rows(run.state), strict=False):
        phases = dict(row["phases"])
        detected_at = row["at"] + (phases["detect_s"] or 0.0)
        phases["detect_s"] = max(0.0, detected_at - blow.at)
        parts = [phases[name] for name, _ in PHASES[:-1]]
        phases["total_s"] = sum(part or 0.0 for part in parts)
        rows.append({**row, "blow": blow.what, "phases": phases})
    away = run.history.away
    if len(blows) > len(rows) and away:
        since, until = away[-1]
        rows.append(
            {
                "blow": blows[-1].what,
                "cause": "no supervisor",
                "decision": "take the lease, adopt the agents",
                "reason": f"epoch {run.state.epoch}; the ranks trained on, none was restarted",
                "steps_lost": 0,
                "phases": {name: None for name, _ in PHASES} | {"total_s": until - since},
            }
        )
    return rows


def show_result(
    run: Run,
    blows: tuple[Blow, ...],
    sums: dict[str, dict[str, str]],
    out: Path,
    took_s: float,
) -> int:
    """Print the table, the sums and where the reports lie; 0 when both runs are equal."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    rows = rows_of(run, blows)
    show_incidents(console, rows)
    _show_interval(console, run)
    goodput = account(run.state, run.history, run.state.at)
    console.print(
        f"goodput {percent(goodput.ratio)} of {seconds(goodput.wall_s)} with three incidents"
    )
    equal = show_sums(console, sums)
    console.print(f"report: {out / 'report.html'} and {out / 'report.png'}")
    console.print(f"the whole demo took {seconds(took_s)}")
    return 0 if equal and len(rows) == len(blows) else 1


def show_incidents(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the incidents as a table, on a narrow terminal as a few lines each."""
    if console.width < TABLE_WIDTH:
        console.print(Text("Incidents (seconds by phase)", style="italic"))
        for row in rows:
            console.print(_lines(row))
        return
    console.print(_table(rows))
    for row in rows:
        console.print(Text(f"  {row['blow']}: {row['reason']}", style="dim"))


def _lines(row: dict[str, Any]) -> Table:
    phases = [(name, row["phases"][key]) for key, name in PHASES]
    took = ", ".join(f"{name} {value:.2f}" for name, value in phases if value is not None)
    lost = "-" if row["steps_lost"] is None else str(row["steps_lost"])
    return grid(
        [
            ("what happened", Text(row["blow"], style="bold")),
            ("cause found", row["cause"]),
            ("decision", f"{row['decision']}: {row['reason'].removeprefix(row['cause'] + '; ')}"),
            ("took", f"{took}; steps lost {lost}\n"),
        ]
    )


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Incidents (seconds by phase)", title_justify="left", expand=False)
    for name in ("what happened", "cause found", "decision"):
        table.add_column(name, overflow="fold")
    for _, name in PHASES:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("steps lost", justify="right")
    for row in rows:
        cells = [_number(row["phases"][name]) for name, _ in PHASES]
        lost = "-" if row["steps_lost"] is None else str(row["steps_lost"])
        table.add_row(row["blow"], row["cause"], row["decision"], *cells, lost)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _show_interval(console: Console, run: Run) -> None:
    """Tell how the governor moved the checkpoint interval."""
    for record in run.records:
        event = record.event
        if isinstance(event, ev.DecisionMade) and isinstance(event.decision.action, SetInterval):
            change = event.decision.action
            moved = f"{change.previous_steps} -> {change.interval_steps} steps"
            why = event.decision.reason.removeprefix(moved).removeprefix(": ").strip()
            console.print(f"checkpoint interval {moved}: {why}")


def show_sums(console: Console, sums: dict[str, dict[str, str]]) -> bool:
    """Print both runs' sums below each other; they are short enough for 80 columns."""
    console.print(Text("SHA-256 of the final state, read back from S3", style="italic"))
    broken, calm = sums.values()
    width = max(map(len, sums))
    for part in ("weights", "optimizer", "all"):
        console.print(part)
        for name, digests in sums.items():
            console.print(f"  {name:{width}}  {digests[part]}", soft_wrap=True)
    equal = broken == calm
    verdict = "equal, bit for bit" if equal else "NOT EQUAL"
    console.print(Text(verdict, style="bold green" if equal else "bold red"))
    return equal
