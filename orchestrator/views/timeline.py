"""The picture of a run's time: one lane per node, and marks for what happened."""

from bisect import bisect_right
from dataclasses import dataclass

from orchestrator.core.state import State
from orchestrator.views.goodput import Goodput, Span
from orchestrator.views.history import History

MOST_LANES = 16
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of the picture.

    Attributes:
        name: The node; `all nodes` when there are too many for one lane each.
        there: Times at which the node was there, as (from, until).
        spans: What its ranks did.
    """

    name: str
    there: tuple[tuple[float, float], ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Everything that the picture shows; times are Unix seconds.

    Attributes:
        supervised: Times with a supervisor, as (from, until).
        incidents: (fault at, number of the incident).
        commits: When a checkpoint was committed.
    """

    start: float
    end: float
    lanes: tuple[Lane, ...]
    supervised: tuple[tuple[float, float], ...]
    incidents: tuple[tuple[float, int], ...]
    commits: tuple[float, ...]


def timeline(state: State, history: History, goodput: Goodput) -> Timeline:
    """Lay out the run's time."""
    start, end = goodput.start, goodput.start + goodput.wall_s
    return Timeline(
        start=start,
        end=end,
        lanes=_lanes(history, goodput, end),
        supervised=_supervised(history, start, end),
        incidents=tuple((i.fault_at, i.number) for i in state.incidents),
        commits=tuple(c.at for c in history.commits),
    )


def time_ticks(length_s: float, most: int = 10) -> list[float]:
    """Return round seconds from 0 to `length_s` for an axis, at most `most` steps."""
    days = [86_400 * n for n in (1, 2, 5, 10, 20, 50, 100)]
    step = next((s for s in (*TICKS_S, *days) if length_s / s <= most), days[-1])
    return [k * step for k in range(int(length_s // step) + 1)]


def tick_label(value_s: float, length_s: float) -> str:
    """Label a moment of the axis: `1:30`, `2:15:00`, `3 d 4 h`."""
    whole = round(value_s)
    if length_s >= 2 * 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
    if length_s >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


def number_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers between `low` and `high` for an axis."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    scale = 10.0 ** (len(f"{raw:.0f}") - 1 if raw >= 1 else -_leading_zeros(raw))
    step = next(k * scale for k in (0.1, 0.2, 0.5, 1, 2, 5, 10) if k * scale >= raw * (1 - 1e-9))
    first = -(-low // step)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + k) * step, 10) for k in range(count)]


def _leading_zeros(value: float) -> int:
    zeros = 0
    while value < 1 and zeros < 30:
        value, zeros = value * 10, zeros + 1
    return zeros


def _lanes(history: History, goodput: Goodput, end: float) -> tuple[Lane, ...]:
    if len(history.presence) > MOST_LANES:
        whole = tuple(s for s in goodput.spans if s.attempt is not None)
        return (Lane(name="all nodes", there=((goodput.start, end),), spans=whole),)
    lanes = []
    for name, stays in history.presence.items():
        there = tuple((since, end if until is None else until) for since, until in stays)
        spans = [
            cut
            for span in goodput.spans
            if span.attempt is not None and name in history.attempts[span.attempt].nodes
            for cut in _inside(span, there)
        ]
        lanes.append(Lane(name=name, there=there, spans=tuple(spans)))
    return tuple(lanes)


def _inside(span: Span, there: tuple[tuple[float, float], ...]) -> list[Span]:
    """Cut a span to the times at which its node was there."""
    k = max(0, bisect_right(there, (span.start, float("inf"))) - 1)
    cuts = []
    for since, until in there[k:]:
        start, stop = max(span.start, since), min(span.end, until)
        if stop > start:
            cuts.append(Span(start=start, end=stop, use=span.use, attempt=span.attempt))
    return cuts


def _supervised(history: History, start: float, end: float) -> tuple[tuple[float, float], ...]:
    times, at = [], start
    for since, until in history.away:
        times.append((at, since))
        at = until
    times.append((at, end))
    return tuple(times)
