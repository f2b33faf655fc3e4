"""What `everstep run` shows while it runs: a live panel, or one line per event."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from orchestrator.core import events as ev
from orchestrator.core.record import Record
from orchestrator.core.state import RunPhase, State
from orchestrator.views.events import describe, line
from orchestrator.views.goodput import Use, account
from orchestrator.views.history import History, is_quiet
from orchestrator.views.palette import COLOR
from orchestrator.views.saves import missed_words, saving_bar
from orchestrator.views.status import headline, status
from orchestrator.views.tables import (
    attempt_words,
    checkpoint_words,
    folder_rows,
    grid,
    progress_words,
    title_line,
)
from orchestrator.views.units import clock, count, percent, seconds

REFRESH_HZ = 4
EVENTS = 8
PROGRESS_EVERY_S = 5.0


class LiveView:
    """A panel that is drawn again four times a second; bad news stays in the scrollback.

    `show` is called from the supervisor's loop and makes the panel; rich's own thread only draws
    what was made, since the history changes under it.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._made_at = 0.0
        self._state = State()
        self._body: RenderableType = Text("starting the supervisor", style="dim")
        self._spinner = Spinner("dots", style="green")
        self._live = Live(
            console=console,
            get_renderable=self.render,
            refresh_per_second=REFRESH_HZ,
            transient=True,
            redirect_stdout=False,
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, state: State, history: History, records: Sequence[Record]) -> None:
        """Take the new state; bad news is printed above the panel, where it stays."""
        for record in records:
            if is_headline(record.event):
                self._live.console.print(event_line(record))
        routine = all(is_quiet(record.event) for record in records)
        if routine and self._now() - self._made_at < 1 / REFRESH_HZ:
            return
        self._made_at = self._now()
        self._body = _body(state, history, max(self._made_at, state.at))
        self._state = state

    def render(self) -> RenderableType:
        """Draw the panel."""
        state, body = self._state, self._body
        if state.run is None:
            return body
        elapsed_s = max(self._now(), state.at) - state.requested_at
        word = state.outcome.value if state.outcome else state.phase.value
        title = title_line({"run": state.run.run, "outcome": None, "phase": word})
        title.append(f"  {seconds(elapsed_s)}", style="dim")
        top = Table.grid(expand=True, padding=(0, 1))
        top.add_column(width=1)
        top.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        busy = state.phase not in (RunPhase.OVER, RunPhase.FINISHING)
        top.add_row(self._spinner if busy else " ", Text(headline(state), style="dim"))
        panel = Group(top, "", body)
        return Panel(panel, title=title, title_align="left", border_style="dim")


class PlainView:
    """One line per event in words; progress at most every few seconds."""

    def __init__(self, write: Callable[[str], None], every_s: float = PROGRESS_EVERY_S) -> None:
        self._write = write
        self._every_s = every_s
        self._progress_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, _state: State, _history: History, records: Sequence[Record]) -> None:
        """Write what is new."""
        for record in records:
            if isinstance(record.event, ev.Progress):
                if record.at - self._progress_at < self._every_s:
                    continue
                self._progress_at = record.at
            elif is_quiet(record.event):
                continue
            self._write(line(record))


def is_headline(event: ev.Event) -> bool:
    """Whether an event is worth keeping in the scrollback of the live view."""
    return isinstance(event, ev.FaultJudged | ev.AgentLost | ev.LeaseTaken | ev.OperatorSaid)


def event_line(record: Record) -> Text:
    """Render an event as one line, bad news in red."""
    bad = isinstance(
        record.event, ev.FaultJudged | ev.AgentLost | ev.RankOverdue | ev.CommitRefused
    )
    if isinstance(record.event, ev.RankExited):
        bad = record.event.code != 0 and not record.event.ours
    good = isinstance(record.event, ev.CheckpointCommitted)
    style = "red" if bad else "green" if good else ""
    text = Text.assemble((f"{clock(record.at)}  ", "dim"), (describe(record.event), style))
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _body(state: State, history: History, now: float) -> RenderableType:
    body = status(state, history, now)
    rows: list[tuple[str, RenderableType]] = [("progress", progress_words(body["progress"]))]
    if body["attempt"] is not None:
        rows.append(("attempt", attempt_words(body["attempt"])))
    rows.append(("checkpoint", checkpoint_words(body["checkpoints"])))
    if body["checkpoints"]["enabled"]:
        rows.append(("saving", saving_bar(body["checkpoints"])))
        if missed := missed_words(body["checkpoints"]):
            rows.append(("not saved", Text(missed, style="yellow")))
        rows.append(("interval", f"every {count(state.interval_steps, 'step')}"))
    rows += folder_rows(body)
    rows.append(("goodput", _bar(state, history, now)))
    recent = [event_line(record) for record in list(history.notable)[-EVENTS:]]
    return Group(grid(rows), "", *recent)


def _bar(state: State, history: History, now: float, width: int = 40) -> Text:
    goodput = account(state, history, now)
    bar = Text(f"{percent(goodput.ratio):>6}  ")
    for use in COLOR:
        cells = round(width * goodput.seconds[use] / goodput.wall_s) if goodput.wall_s else 0
        bar.append("\u2588" * cells, style=COLOR[use])
    lost = goodput.seconds[Use.LOST]
    bar.append(f"  lost work {seconds(lost)}" if lost else "", style="dim")
    return bar
