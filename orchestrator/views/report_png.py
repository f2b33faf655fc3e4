"""The report as one picture, drawn with matplotlib (extra `demo`)."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import PreconditionError
from orchestrator.views.palette import COLOR, CURVE, INCIDENT, LABEL, REFERENCE
from orchestrator.views.report import Report, agreement_words, thinned
from orchestrator.views.svg import used
from orchestrator.views.timeline import tick_label, time_ticks
from orchestrator.views.units import count, percent, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEXT, SOFT, GRID, TRACK = "#18212c", "#5c6b7c", "#e1e6ec", "#e6ebf0"
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": TEXT,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
}
WIDTH_IN, DPI, COLUMNS = 12.0, 150, 4
HEADER_IN, FOOTER_IN, GAPS_IN = 1.45, 0.3, 1.7


def render_png(report: Report, path: Path) -> None:
    """Write the picture: timeline, loss, where the time went.

    Raises:
        PreconditionError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PreconditionError(
            "a picture needs matplotlib: pip install 'everstep[demo]', or use --no-png"
        ) from error
    lanes = len(report.timeline.lanes) + 2
    heights = [0.34 * lanes + 0.1, 3.0, 1.35]
    total = sum(heights) + HEADER_IN + FOOTER_IN + GAPS_IN
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, total), dpi=DPI, facecolor="white")
        grid = figure.add_gridspec(
            len(heights),
            height_ratios=heights,
            hspace=GAPS_IN / 2 / (sum(heights) / len(heights)),
            left=0.085,
            right=0.975,
            top=1 - HEADER_IN / total,
            bottom=FOOTER_IN / total,
        )
        _title(figure, report, total)
        _timeline(figure.add_subplot(grid[0]), report)
        _loss(figure.add_subplot(grid[1]), report)
        _uses(figure.add_subplot(grid[2]), report)
        figure.savefig(path, format="png")


def _title(figure: Any, report: Report, height_in: float) -> None:
    rows = report.status["incidents"]
    lost = sum(row["steps_lost"] or 0 for row in rows)
    figure.text(
        0.02, 1 - 0.35 / height_in, report.name, fontsize=16, fontweight="bold", va="center"
    )
    words = (
        f"{report.status['outcome'] or report.status['phase']}   |   "
        f"goodput {percent(report.goodput.ratio)} of {seconds(report.goodput.wall_s)}   |   "
        f"{count(len(rows), 'incident')}, {count(lost, 'step')} run again"
    )
    figure.text(0.02, 1 - 0.68 / height_in, words, fontsize=10, color=SOFT, va="center")


def _timeline(axes: "Axes", report: Report) -> None:
    line = report.timeline
    names = ["supervisor", *(lane.name for lane in line.lanes), "checkpoints"]
    for since, until in line.supervised:
        _bar(axes, 0, [(since - line.start, until - since)], SOFT, 0.2)
    for k, lane in enumerate(line.lanes, start=1):
        _bar(axes, k, [(a - line.start, b - a) for a, b in lane.there], TRACK, 0.2)
        for span in lane.spans:
            length = span.end - span.start
            _bar(axes, k, [(span.start - line.start, length)], COLOR[span.use], 0.76)
    times = [at - line.start for at in line.commits]
    color = COLOR[list(COLOR)[1]]
    axes.plot(times, [len(names) - 1] * len(times), "D", color=color, markersize=4.5, ls="")
    for at, number in line.incidents:
        axes.axvline(at - line.start, color=INCIDENT, lw=1, ls=(0, (3, 3)), zorder=3)
        _badge(axes, at - line.start, -0.85, number)
    length = max(line.end - line.start, 1e-9)
    ticks = time_ticks(length)
    axes.set_xticks(ticks, [tick_label(tick, length) for tick in ticks])
    axes.set_yticks(range(len(names)), names, color=TEXT)
    axes.set_ylim(len(names) - 0.4, -0.7)
    axes.set_xlim(0, length * 1.004)
    axes.set_title("Timeline", y=1.06)
    _quiet(axes, "x")


def _loss(axes: "Axes", report: Report) -> None:
    if report.reference is not None:
        steps, losses = _columns(report.reference.curve)
        label = f"{report.reference.name} (reference)"
        axes.plot(steps, losses, color=REFERENCE, lw=4.5, alpha=0.5, label=label)
    for k, piece in enumerate(report.lost):
        steps, losses = _columns(piece)
        label = "lost and run again" if k == 0 else "_"
        axes.plot(steps, losses, color=INCIDENT, lw=4.5, alpha=0.4, label=label)
    steps, losses = _columns(report.curve)
    axes.plot(steps, losses, color=CURVE, lw=1.3, label=report.name)
    top = axes.get_ylim()[1]
    for step, number in report.marks:
        axes.axvline(step, color=INCIDENT, lw=1, ls=(0, (3, 3)), alpha=0.7)
        _badge(axes, step, top, number)
    axes.set_xlim(0, max([1, *steps]) * 1.004)
    axes.set_ylabel("loss")
    axes.set_xlabel("step", labelpad=2)
    axes.set_title("Loss", y=1.02)
    words = agreement_words(report)
    if words:
        axes.set_title(words, loc="right", fontsize=8.5, fontweight="normal", color=SOFT, y=1.02)
    if steps:
        axes.legend(frameon=False, loc="upper right", fontsize=8.5, labelcolor=TEXT)
    _quiet(axes, "both")


def _uses(axes: "Axes", report: Report) -> None:
    at, wall = 0.0, max(report.goodput.wall_s, 1e-9)
    for k, use in enumerate(used(report)):
        value = report.goodput.seconds[use]
        axes.barh(0, value, left=at, height=0.8, color=COLOR[use], edgecolor="white", lw=0.8)
        at += value
        x, y = wall * (k % COLUMNS) / COLUMNS, -1.1 - 0.62 * (k // COLUMNS)
        width = wall / COLUMNS
        axes.plot([x + width * 0.02], [y], "s", color=COLOR[use], markersize=6.5)
        axes.text(x + width * 0.06, y, LABEL[use], va="center_baseline")
        words = f"{seconds(value)}   {percent(value / wall):>6}"
        axes.text(x + width * 0.93, y, words, va="center_baseline", ha="right", color=SOFT)
    axes.set_xlim(0, wall)
    axes.set_ylim(-2.7, 0.5)
    axes.axis("off")
    axes.set_title("Where the time went", y=1.0)


def _bar(
    axes: "Axes", row: int, spans: Iterable[tuple[float, float]], color: str, height: float
) -> None:
    axes.broken_barh(list(spans), (row - height / 2, height), facecolors=color, lw=0, zorder=2)


def _badge(axes: "Axes", x: float, y: float, number: int) -> None:
    axes.annotate(
        str(number), (x, y), ha="center", va="center", fontsize=7.5, fontweight="bold",
        color="white", annotation_clip=False, zorder=5,
        bbox={"boxstyle": "circle,pad=0.28", "fc": INCIDENT, "ec": "none"},
    )  # fmt: skip


def _columns(curve: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    points = thinned(curve)
    return [step for step, _ in points], [loss for _, loss in points]


def _quiet(axes: "Axes", grid: str) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GRID, lw=0.8)  # type: ignore[arg-type]
