"""What the views need of the past and the state no longer holds: attempts, progress, commits.

A supervisor keeps one `History` beside its state and shows it every record once; a reader of a
stored journal builds it with `History.of`. It grows with attempts, commits and absences; of
progress and records it keeps a bounded number.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.core import events as ev
from orchestrator.core.actions import Commit, Decision, Finish, Prune, SetInterval
from orchestrator.core.fold import fold
from orchestrator.core.record import Record
from orchestrator.core.saves import SaveCost
from orchestrator.core.state import Attempt, State

KEPT_POINTS = 2048
KEPT_RECORDS = 200
KEPT_CODES = 32
QUIET = (
    ev.Progress,
    ev.Staged,
    ev.Replicated,
    ev.ShardUploaded,
    ev.ActionDone,
    ev.PolicySet,
    ev.RanksGone,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Progress at one moment; `stalled_s` sums the blocking time of saves of this attempt."""

    at: float
    step: int
    loss: float
    tokens: int
    stalled_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint and when it became one."""

    at: float
    step: int
    attempt: int
    nbytes: int


@dataclass(slots=True, kw_only=True)
class Sums:
    """What all committed saves took together, as far as it was measured."""

    sent_nbytes: int = 0
    hedges: int = 0
    retries: Counter[str] = field(default_factory=Counter)

    def add(self, cost: SaveCost) -> None:
        """Count one more; codes beyond a bound, which a store makes up, count together."""
        self.sent_nbytes += cost.sent_nbytes
        self.hedges += cost.hedges
        for code, times in cost.retries.items():
            is_known = code in self.retries or len(self.retries) < KEPT_CODES
            self.retries[code if is_known else "other"] += times


def is_quiet(event: ev.Event) -> bool:
    """Whether the event is routine: left out where only what matters is shown."""
    if isinstance(event, ev.DecisionMade):
        return isinstance(event.decision.action, Commit | Prune)
    if isinstance(event, ev.RetentionPlanned):
        return not event.problem
    if isinstance(event, ev.FolderWatched):
        return event.step in (ev.FolderStep.UPLOADED, ev.FolderStep.KNOWN)
    return isinstance(event, QUIET)


class History:
    """The past of one run, grown record by record.

    Attributes:
        attempts: The last known form of each attempt, by number.
        points: Progress per attempt, thinned when it gets long.
        away: Times without a supervisor, as (last record before, lease taken).
        presence: Times that each node was there, as [from, until]; until is None while it is.
        sums: What the saves took together.
        interval: The last decision that moved the checkpoint interval.
        finish_at: When the end of the run was decided, None before.
        notable: The latest records that a person may want to read.
    """

    def __init__(self) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.points: dict[int, list[Point]] = {}
        self.away: list[tuple[float, float]] = []
        self.commits: list[Committed] = []
        self.sums = Sums()
        self.presence: dict[str, list[tuple[float, float | None]]] = {}
        self.interval: Decision | None = None
        self.holder: str = ""
        self.finish_at: float | None = None
        self.notable: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self._last_at: float | None = None
        self._saves: dict[int, int] = {}

    @classmethod
    def of(cls, records: Sequence[Record]) -> "tuple[State, History]":
        """Build state and history of a stored journal."""
        state, history = State(), cls()
        for record in records:
            state = fold(state, record)
            history.see(record, state)
        return state, history

    def see(self, record: Record, state: State) -> None:
        """Take in one record and the state after it; call it once per record, in order."""
        event = record.event
        if state.attempt is not None:
            self.attempts[state.attempt.number] = state.attempt
        if not is_quiet(event):
            self.notable.append(record)
        match event:
            case ev.Progress():
                self._progress(record, event)
            case ev.LeaseTaken():
                self._lease(record, event)
            case ev.CheckpointCommitted():
                self._commit(record, event)
            case ev.AgentJoined() | ev.AgentLost():
                self._node(record, event, state)
            case ev.DecisionMade(decision=decision) if isinstance(decision.action, SetInterval):
                self.interval = decision
            case ev.DecisionMade(decision=decision) if isinstance(decision.action, Finish):
                self.finish_at = record.at
            case _:
                pass
        self._last_at = record.at

    @property
    def latest(self) -> Point | None:
        """The newest progress of the newest attempt that made any."""
        return self.points[max(self.points)][-1] if self.points else None

    def last_step_at(self) -> float | None:
        """Return when the newest step was first reported, None before the first."""
        if not self.points:
            return None
        points = self.points[max(self.points)]
        return next((p.at for p in points if p.step == points[-1].step), None)

    def tokens_per_s(self) -> float | None:
        """Return the mean speed of the newest attempt, None while it is not measured."""
        if not self.points:
            return None
        points = self.points[max(self.points)]
        first, last = points[0], points[-1]
        if last.at <= first.at or last.tokens <= first.tokens or first.tokens == 0:
            return None
        return (last.tokens - first.tokens) / (last.at - first.at)

    def _progress(self, record: Record, event: ev.Progress) -> None:
        if event.attempt not in self.attempts:
            return
        points = self.points.setdefault(event.attempt, [])
        saves = event.saves - self._saves.get(event.attempt, 0)
        stalled_s = points[-1].stalled_s if points else 0.0
        if saves > 0:
            self._saves[event.attempt] = event.saves
            stalled_s += saves * event.stall_s if math.isfinite(event.stall_s) else 0.0
        last = points[-1] if points else None
        points.append(
            Point(
                at=record.at,
                step=max(event.min_step, last.step if last else -1),
                loss=event.loss if math.isfinite(event.loss) or not last else last.loss,
                tokens=max(event.tokens, last.tokens if last else 0),
                stalled_s=stalled_s,
            )
        )
        if len(points) > KEPT_POINTS:
            self.points[event.attempt] = [*points[:-1:2], points[-1]]

    def _lease(self, record: Record, event: ev.LeaseTaken) -> None:
        self.holder = event.holder
        if self._last_at is not None and event.epoch > 1 and record.at > self._last_at:
            self.away.append((self._last_at, record.at))

    def _commit(self, record: Record, event: ev.CheckpointCommitted) -> None:
        self.commits.append(
            Committed(at=record.at, step=event.step, attempt=event.attempt, nbytes=event.nbytes)
        )
        if event.cost is not None:
            self.sums.add(event.cost)

    def _node(self, record: Record, event: ev.AgentJoined | ev.AgentLost, state: State) -> None:
        stays = self.presence.setdefault(event.node, [])
        node = state.nodes.get(event.node)
        was_here = bool(stays) and stays[-1][1] is None
        if isinstance(event, ev.AgentJoined) and not was_here:
            stays.append((record.at, None))
        elif isinstance(event, ev.AgentLost) and was_here and node and not node.alive:
            stays[-1] = (stays[-1][0], record.at - event.silent_s)
