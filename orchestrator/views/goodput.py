"""Where the wall time of a run went; every second is counted once, so the parts sum to it.

Only new steps are productive. A step that is run again after a restart was lost, and so is the
step that was in flight when the fault came. A script without heartbeats runs, and nobody can say
what it does: that time is unmeasured, neither productive nor lost. Time without a supervisor is
no part of the sum: the ranks train on while it is away.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from orchestrator.core.state import Attempt, Incident, State
from orchestrator.views.history import History, Point


class Use(StrEnum):
    """What a stretch of wall time was used for."""

    STEP = "step"
    CHECKPOINT = "checkpoint"
    LOST = "lost"
    DETECT = "detect"
    STOP = "stop"
    START = "start"
    RESTORE = "restore"
    FIRST_STEP = "first_step"
    INIT = "init"
    QUEUE = "queue"
    FINISH = "finish"
    UNMEASURED = "unmeasured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of the run's time; `attempt` is None outside attempts."""

    start: float
    end: float
    use: Use
    attempt: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The account of a run.

    Attributes:
        seconds: Seconds per use; they sum to `wall_s`.
        spans: The same in order of time. Checkpoint stalls lie inside `step` spans here.
        away_s: Time without a supervisor, beside the sum.
    """

    start: float
    wall_s: float
    seconds: Mapping[Use, float]
    spans: tuple[Span, ...]
    away_s: float

    @property
    def ratio(self) -> float | None:
        """Productive time over wall time; None before any time has passed."""
        return self.seconds[Use.STEP] / self.wall_s if self.wall_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The time to recover from one incident, by phase; None means not measured."""

    detect_s: float | None
    stop_s: float | None
    start_s: float | None
    restore_s: float | None
    first_step_s: float | None
    total_s: float | None


def account(state: State, history: History, now: float) -> Goodput:
    """Account for the time from the request of the run until `now`, or until its end."""
    end = state.at if state.over else max(now, state.at)
    marks = _marks(state, history)
    spans = _spans(marks, end)
    seconds = dict.fromkeys(Use, 0.0)
    for span in spans:
        seconds[span.use] += span.end - span.start
    stalled = min(_stalled_s(spans, history), seconds[Use.STEP])
    seconds[Use.STEP] -= stalled
    seconds[Use.CHECKPOINT] += stalled
    return Goodput(
        start=state.requested_at,
        wall_s=max(0.0, end - state.requested_at),
        seconds=seconds,
        spans=spans,
        away_s=sum(until - since for since, until in history.away),
    )


def phases(incident: Incident) -> Phases:
    """Split the time from fault to first new step."""
    back_at = incident.restoring_at or incident.stepping_at
    return Phases(
        detect_s=_between(incident.fault_at, incident.detected_at),
        stop_s=_between(incident.detected_at, incident.stopped_at),
        start_s=_between(incident.stopped_at, back_at),
        restore_s=_between(incident.restoring_at, incident.stepping_at),
        first_step_s=_between(incident.stepping_at, incident.first_step_at),
        total_s=_between(incident.fault_at, incident.first_step_at),
    )


def steps_lost(incident: Incident) -> int | None:
    """Count the finished steps that had to be run again; None while nothing was restarted."""
    if incident.resumed_step is None:
        return None
    return max(0, incident.step - incident.resumed_step)


def _between(since: float | None, until: float | None) -> float | None:
    return None if since is None or until is None else max(0.0, until - since)


Mark = tuple[float, Use, int | None]


def _marks(state: State, history: History) -> list[Mark]:
    """List the moments at which the use of time changes."""
    marks: list[Mark] = [(state.requested_at, Use.QUEUE, None)]
    kept = _kept_steps(history.attempts)
    beats = any(a.restoring_at or a.stepping_at for a in history.attempts.values())
    first = min(history.attempts, default=0)
    for number in sorted(history.attempts):
        attempt = history.attempts[number]
        if not beats and attempt.started_at is not None:
            marks += _silent_marks(attempt, number == first)
            continue
        marks += _attempt_marks(
            attempt, history.points.get(number, []), kept[number], number == first
        )
    if history.finish_at is not None:
        marks.append((history.finish_at, Use.FINISH, None))
    return marks


def _kept_steps(attempts: Mapping[int, Attempt]) -> dict[int, float]:
    """Return per attempt the last of its steps that no later attempt ran again."""
    kept, lowest = {}, math.inf
    for number in sorted(attempts, reverse=True):
        kept[number] = lowest
        restore = attempts[number].restore
        lowest = min(lowest, restore.step if restore else 0)
    return kept


def _silent_marks(attempt: Attempt, is_first: bool) -> list[Mark]:
    """List the marks of an attempt of which only start and end are known."""
    uses: list[tuple[float | None, Use]] = [(attempt.started_at, Use.UNMEASURED)]
    return _with_end(attempt, uses, is_first)


def _attempt_marks(
    attempt: Attempt, points: list[Point], kept: float, is_first: bool
) -> list[Mark]:
    uses = [
        (attempt.restoring_at, Use.RESTORE),
        (attempt.stepping_at, Use.FIRST_STEP),
        (attempt.first_step_at, Use.STEP),
        (_lost_since(attempt, points, kept), Use.LOST),
    ]
    return _with_end(attempt, uses, is_first)


def _with_end(
    attempt: Attempt, healthy: list[tuple[float | None, Use]], is_first: bool
) -> list[Mark]:
    """Put the order to start before the healthy part, and its end behind it."""
    trouble = attempt.first_trouble
    ends = attempt.trouble_since if trouble else attempt.stop_ordered_at or attempt.over_at
    uses = [(attempt.ordered_at, Use.INIT if is_first else Use.START)]
    uses += [(at, use) for at, use in healthy if at is not None and (ends is None or at < ends)]
    if trouble is not None:
        uses += [(attempt.trouble_since, Use.DETECT), (trouble.at, Use.STOP)]
    elif attempt.stop_ordered_at is not None:
        uses.append((attempt.stop_ordered_at, Use.STOP))
    marks: list[Mark] = [(at, use, attempt.number) for at, use in uses]
    if attempt.over_at is not None:
        goes_on = trouble is not None or bool(attempt.moved) or any(attempt.exits.values())
        marks.append((attempt.over_at, Use.QUEUE if goes_on else Use.FINISH, None))
    return marks


def _lost_since(attempt: Attempt, points: list[Point], kept: float) -> float | None:
    """Return when the work began that was thrown away, None when nothing was."""
    if attempt.first_step_at is None:
        return None
    last = max([attempt.min_step, *(p.step for p in points)])
    if attempt.first_trouble is None and kept >= last:
        return None
    base = attempt.restore.step if attempt.restore else 0
    target = min(kept, last)
    if target <= base:
        return attempt.first_step_at
    seen = [(base + 1, attempt.first_step_at)]
    seen += [(p.step, p.at) for p in points if p.at > attempt.first_step_at and p.step > base]
    return _time_at(target, _rising(seen))


def _rising(seen: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Keep the first sight of each step."""
    rising: list[tuple[int, float]] = []
    for step, at in seen:
        if not rising or step > rising[-1][0]:
            rising.append((step, at))
    return rising


def _time_at(step: float, seen: list[tuple[int, float]]) -> float:
    """Return when `step` was finished, between two reports by a straight line."""
    place = bisect_left(seen, step, key=lambda pair: pair[0])
    if place == 0:
        return seen[0][1]
    if place == len(seen):
        return seen[-1][1]
    (before, since), (after, until) = seen[place - 1], seen[place]
    return since + (until - since) * (step - before) / (after - before)


def _spans(marks: list[Mark], end: float) -> tuple[Span, ...]:
    """Turn marks into spans; a mark that lies before its forerunner (clocks) moves up to it."""
    spans, at = [], marks[0][0]
    for (_, use, attempt), (until, _, _) in pairwise([*marks, (end, Use.FINISH, None)]):
        stop = min(max(until, at), max(end, at))
        if stop > at:
            spans.append(Span(start=at, end=stop, use=use, attempt=attempt))
        at = stop
    return tuple(spans)


def _stalled_s(spans: tuple[Span, ...], history: History) -> float:
    """Sum the stalls of saves inside productive spans (those in lost work are lost anyway)."""
    total = 0.0
    for span in spans:
        if span.use is Use.STEP and span.attempt is not None:
            points = history.points.get(span.attempt, [])
            total += max((p.stalled_s for p in points if p.at <= span.end), default=0.0)
    return total
