"""The report's pictures as inline SVG, drawn by hand; colors of text come from the page's CSS."""

import html
from collections.abc import Iterable

from orchestrator.views.goodput import Use
from orchestrator.views.palette import COLOR, INCIDENT, LABEL, REFERENCE
from orchestrator.views.report import Curve, Report, thinned
from orchestrator.views.timeline import Lane, Timeline, number_ticks, tick_label, time_ticks
from orchestrator.views.units import seconds

WIDTH = 1132
LABELS = 96
LANE = 24
GAP = 9
TOP = 30


def timeline_svg(line: Timeline) -> str:
    """Draw the lanes of a run with its incidents and checkpoints."""
    lanes = 2 + len(line.lanes)
    bottom = TOP + lanes * (LANE + GAP)
    height = bottom + 30
    parts = [*_time_axis(line, bottom), *_supervisor_lane(line, TOP)]
    for k, lane in enumerate(line.lanes):
        parts += _node_lane(line, lane, TOP + (k + 1) * (LANE + GAP))
    parts += _commit_lane(line, TOP + (lanes - 1) * (LANE + GAP))
    parts += _incident_marks(line, bottom)
    return _svg(height, "timeline of the run", parts)


def loss_svg(report: Report, height: int = 330) -> str:
    """Draw the loss over the step: this run, what was run again, and the reference."""
    curves = [report.curve, *([report.reference.curve] if report.reference else [])]
    points = [point for curve in curves for point in curve]
    if len(points) < 2:
        return '<p class="empty">No loss was reported.</p>'
    chart = _Chart(points, height)
    parts = chart.axes("step", "loss")
    parts += [
        _line(chart.x(step), chart.top, chart.x(step), chart.bottom, "var(--bad)", "3 4", 0.6)
        for step, _ in report.marks
    ]
    if report.reference:
        parts.append(chart.path(report.reference.curve, REFERENCE, 6, 0.5))
    parts += [chart.path(piece, INCIDENT, 6, 0.4) for piece in report.lost]
    parts.append(chart.path(report.curve, "var(--info)", 1.7, 1))
    parts += [_badge(chart.x(step), chart.top - 2, number) for step, number in report.marks]
    return _svg(height, "loss over step", parts)


class _Chart:
    """The frame of a chart: scales and axes."""

    def __init__(self, points: Curve, height: int) -> None:
        steps, losses = [p[0] for p in points], [p[1] for p in points]
        pad = (max(losses) - min(losses)) * 0.06 or 0.5
        self.low, self.high = min(losses) - pad, max(losses) + pad
        self.first, self.last = min(steps), max(*steps, min(steps) + 1)
        self.left, self.right, self.top, self.bottom = 52, WIDTH - 14, 22, height - 42

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first)
        return self.left + share * (self.right - self.left)

    def y(self, loss: float) -> float:
        share = (self.high - loss) / (self.high - self.low)
        return self.top + share * (self.bottom - self.top)

    def axes(self, across: str, up: str) -> list[str]:
        parts = []
        for value in number_ticks(self.low, self.high):
            y = self.y(value)
            parts.append(_line(self.left, y, self.right, y))
            parts.append(_text(self.left - 9, y + 4, f"{value:g}", "end"))
        parts += [
            _text(self.x(value), self.bottom + 18, f"{value:,.0f}", "middle")
            for value in number_ticks(self.first, self.last, 10)
        ]
        middle = (self.left + self.right) / 2
        parts.append(_text(middle, self.bottom + 37, across, "middle", "axis"))
        turned = f'transform="rotate(-90 12 {(self.top + self.bottom) / 2:.0f})"'
        parts.append(_text(12, (self.top + self.bottom) / 2, up, "middle", "axis", turned))
        return parts

    def path(self, curve: Curve, color: str, width: float, opacity: float) -> str:
        points = " ".join(f"{self.x(s):.1f},{self.y(v):.1f}" for s, v in thinned(curve))
        return (
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}" '
            f'stroke-opacity="{opacity}" stroke-linejoin="round" stroke-linecap="round"/>'
        )


def used(report: Report) -> list[Use]:
    """Return the uses that took any time, in the order of the palette."""
    return [use for use in COLOR if report.goodput.seconds[use] > 0.0005]


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">'
        + "".join(parts)
        + "</svg>"
    )


def _at(line: Timeline, at: float) -> float:
    share = (at - line.start) / max(line.end - line.start, 1e-9)
    return LABELS + min(max(share, 0.0), 1.0) * (WIDTH - LABELS - 10)


def _time_axis(line: Timeline, bottom: float) -> list[str]:
    parts = []
    length = line.end - line.start
    for value in time_ticks(length):
        x = _at(line, line.start + value)
        parts.append(_line(x, TOP - 4, x, bottom))
        parts.append(_text(x, bottom + 18, tick_label(value, length), "middle"))
    return parts


def _supervisor_lane(line: Timeline, y: float) -> list[str]:
    parts = [_text(0, y + LANE / 2 + 4, "supervisor", "start", "name")]
    for since, until in line.supervised:
        parts.append(_bar(line, since, until, y + 9, 6, "var(--soft)", "supervisor", 0.75))
    for (_, since), (until, _) in zip(line.supervised, line.supervised[1:], strict=False):
        away = f"no supervisor for {seconds(until - since)}"
        parts.append(_bar(line, since, until, y + 9, 6, "var(--bad)", away, 0.4))
    return parts


def _node_lane(line: Timeline, lane: Lane, y: float) -> list[str]:
    parts = [_text(0, y + LANE / 2 + 4, _short(lane.name), "start", "name")]
    for since, until in lane.there:
        parts.append(_bar(line, since, until, y + 9, 6, "var(--track)", f"{lane.name}: idle"))
    for span in lane.spans:
        title = f"attempt {span.attempt}: {LABEL[span.use]}, {seconds(span.end - span.start)}"
        parts.append(_bar(line, span.start, span.end, y, LANE, COLOR[span.use], title))
    return parts


def _commit_lane(line: Timeline, y: float) -> list[str]:
    parts = [_text(0, y + LANE / 2 + 4, "checkpoints", "start", "name")]
    middle = y + LANE / 2
    every = max(1, len(line.commits) // 400)
    for at in line.commits[::every]:
        x = _at(line, at)
        parts.append(
            f'<path d="M{x:.1f} {middle - 6}l5 6l-5 6l-5 -6z" fill="{COLOR[Use.CHECKPOINT]}"/>'
        )
    return parts


def _incident_marks(line: Timeline, bottom: float) -> list[str]:
    parts = []
    for at, number in line.incidents:
        x = _at(line, at)
        parts.append(_line(x, TOP - 6, x, bottom, "var(--bad)", "3 4", 0.8))
        parts.append(_badge(x, TOP - 16, number))
    return parts


def _bar(
    line: Timeline,
    since: float,
    until: float,
    y: float,
    height: float,
    color: str,
    title: str,
    opacity: float = 1.0,
) -> str:
    x = _at(line, since)
    width = max(_at(line, until) - x, 0.8)
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{color}" '
        f'fill-opacity="{opacity}"><title>{html.escape(title)}</title></rect>'
    )


def _badge(x: float, y: float, number: int) -> str:
    radius = 8 if number < 100 else 11
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{INCIDENT}"/>'
        f'<text x="{x:.1f}" y="{y + 3.6:.1f}" text-anchor="middle" class="badge">{number}</text>'
    )


def _line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    color: str = "var(--line)",
    dash: str = "",
    opacity: float = 1.0,
) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-opacity="{opacity}"{dashes}/>'
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick", extra: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}" {extra}>'
        f"{html.escape(text)}</text>"
    )


def _short(name: str) -> str:
    return name if len(name) <= 13 else name[:6] + ".." + name[-5:]
