"""What a report contains, before it becomes text, HTML or a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.record import Record
from orchestrator.views.goodput import Goodput, account
from orchestrator.views.history import History
from orchestrator.views.losses import Loss, by_attempt, kept_curve
from orchestrator.views.status import status
from orchestrator.views.timeline import Timeline, timeline

Curve = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Another run's loss, to compare with."""

    name: str
    curve: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run as it is reported.

    Attributes:
        status: As in `orchestrator.views.status`, at the end of the journal.
        curve: Loss of each step as the last attempt that ran it has it.
        lost: Pieces of curves that were run again, one per attempt.
        marks: (step, incident number) for the loss chart.
    """

    status: dict[str, Any]
    goodput: Goodput
    timeline: Timeline
    curve: Curve
    lost: tuple[Curve, ...]
    marks: tuple[tuple[int, int], ...]
    reference: Reference | None

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.status["run"])


def build(
    records: Sequence[Record],
    losses: tuple[Loss, ...],
    reference: Reference | None = None,
    earlier: Sequence[dict[str, Any]] = (),
) -> Report:
    """Build the report of a journal; without the job's own losses the journal's coarse ones."""
    state, history = History.of(records)
    goodput = account(state, history, state.at)
    curves = by_attempt(losses) if losses else _journal_curves(history)
    curve = kept_curve(losses) if losses else _kept(curves)
    return Report(
        status=status(state, history, state.at, earlier=earlier),
        goodput=goodput,
        timeline=timeline(state, history, goodput),
        curve=curve,
        lost=_lost(curves),
        marks=tuple((max(i.step, 0), i.number) for i in state.incidents),
        reference=reference,
    )


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as a JSON object: the status, and the comparison if there is one."""
    body = {**report.status}
    if report.reference is not None:
        common, difference = agreement(report.curve, report.reference.curve)
        body["compared"] = {
            "run": report.reference.name,
            "common_steps": common,
            "largest_loss_difference": difference,
        }
    return body


def agreement(curve: Curve, reference: Curve) -> tuple[int, float | None]:
    """Return the number of common steps, and the largest difference of loss among them."""
    other = dict(reference)
    gaps = [abs(loss - other[step]) for step, loss in curve if step in other]
    return len(gaps), max(gaps, default=None)


def agreement_words(report: Report) -> str:
    """Say in one line how the two curves compare; empty without a reference."""
    if report.reference is None:
        return ""
    common, difference = agreement(report.curve, report.reference.curve)
    if difference is None:
        return f"no step in common with {report.reference.name}"
    same = "equal at every step" if difference == 0 else f"largest difference {difference:.3g}"
    return f"{common:,} steps in common with {report.reference.name}: {same}"


def thinned(curve: Curve, most: int = 1200) -> Curve:
    """Keep at most about `most` points, always the last."""
    every = max(1, len(curve) // most)
    return curve[::-every][::-1]


def _journal_curves(history: History) -> dict[int, Curve]:
    return {
        number: [(p.step, p.loss) for p in points if p.loss == p.loss]
        for number, points in history.points.items()
    }


def _kept(curves: dict[int, Curve]) -> Curve:
    newest: dict[int, float] = {}
    for number in sorted(curves):
        newest.update(curves[number])
    return sorted(newest.items())


def _lost(curves: dict[int, Curve]) -> tuple[Curve, ...]:
    """Return per attempt the piece of its curve that a later attempt ran again."""
    pieces = []
    numbers = sorted(n for n in curves if curves[n])
    for k, number in enumerate(numbers[:-1]):
        again = min(curves[later][0][0] for later in numbers[k + 1 :])
        piece = [point for point in curves[number] if point[0] >= again - 1]
        if len(piece) > 1:
            pieces.append(piece)
    return tuple(pieces)
