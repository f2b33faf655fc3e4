"""From what agents and the launcher say to facts for the journal.

Heartbeats come many times a second and only a few matter: a new phase, a rank that is overdue, a
silent agent, and now and then how far the run is. Ages are measured by the side that saw the
event; this module adds its own monotonic clock only to tell how long an agent has been silent,
which `liveness` judges.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from monitors.progress.hang import overdue
from orchestrator.core.events import (
    AgentLost,
    Event,
    PhaseReached,
    Progress,
    RankOverdue,
)
from orchestrator.core.state import Attempt, RunPhase, State
from orchestrator.supervisor.liveness import Liveness
from orchestrator.supervisor.probe import Answered, Probe, address_of
from orchestrator.supervisor.suspicion import Limits
from orchestrator.wire import RankReport, Report

log = logging.getLogger(__name__)

STARTED = ("restore", "step", "checkpoint", "eval", "finish")
STEPPING = ("step", "checkpoint", "eval", "finish")
PROGRESS_SHORTEST_S = 1.0
PROGRESS_LONGEST_S = 15.0
ORDER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A rank report as `monitors.progress.hang` reads it, on the supervisor's clock."""

    step: int
    phase: str
    phase_since: float
    allowed_s: float


class Watch:
    """Remembers the latest reports; everything else is in the state."""

    def __init__(self, started: float, limits: Limits) -> None:
        self._liveness = Liveness(limits, started)
        self._attempt = 0
        self._ranks: dict[int, tuple[float, RankReport]] = {}
        self._connected: set[str] = set()
        self._announced: set[tuple[str, int]] = set()
        self._next_progress = 0.0
        self._last_progress: Progress | None = None

    def connected(self, node: str, now: float) -> None:
        """An agent said hello."""
        self._connected.add(node)
        self._liveness.joined(node, now)

    def disconnected(self, node: str, now: float) -> None:
        """An agent's connection ended; it may well come back."""
        self._connected.discard(node)
        self._liveness.parted(node, now)

    def alive(self, node: str, now: float) -> None:
        """An agent said anything."""
        self._liveness.heard(node, now)

    def answered(self, done: Answered, now: float) -> None:
        """Take what came of a probe that `silent` asked for."""
        self._liveness.answered(done, now)

    def reported(self, node: str, report: Report, now: float) -> None:
        """Take a node's heartbeats."""
        self.alive(node, now)
        if report.attempt != self._attempt:
            if report.attempt < self._attempt:
                return
            self._attempt = report.attempt
            self._ranks.clear()
            self._announced.clear()
            self._last_progress = None
        for rank in report.ranks:
            self._ranks[rank.rank] = (now, rank)

    def ranks(self) -> Mapping[int, RankReport]:
        """Return the latest report of each rank of the newest attempt."""
        return {rank: report for rank, (_, report) in self._ranks.items()}

    def step_ahead(self, now: float) -> int:
        """Return a step that an order sent now reaches all ranks before; 1 when none has reported.

        A report is as old as a heartbeat, and a rank goes on until the order is there.
        """
        return 2 + max(
            (
                report.step + _steps_in(now - at + ORDER_S, report.step_s)
                for at, report in self._ranks.values()
            ),
            default=-1,
        )

    def has_heard(self, node: str) -> bool:
        """Whether a node was heard since it was last lost, if it ever was."""
        return self._liveness.has_heard(node)

    def silent(self, state: State, now: float) -> tuple[list[AgentLost], list[Probe]]:
        """Return the agents that are lost by their silence, and the probes to send now.

        Nobody is asked while the run ends: the agents leave because they were told to.
        """
        is_ending = state.phase in (RunPhase.FINISHING, RunPhase.OVER)
        ports = {
            node.name: None if is_ending else address_of(node.metrics_url)
            for node in state.nodes.values()
            if node.alive
        }
        look = self._liveness.look(ports, now)
        for name in look.busy:
            log.warning("%s says nothing, but its machine answers: waiting for it", name)
        lost = [
            AgentLost(
                node=gone.node,
                incarnation=state.nodes[gone.node].incarnation,
                why=gone.why,
                silent_s=gone.silent_s,
            )
            for gone in look.lost
        ]
        return lost, look.probes

    def silent_s(self, nodes: Iterable[str], now: float) -> dict[str, float]:
        """Return for how long each of the nodes has been gone, if it is."""
        return {node: self._liveness.gone_s(node, now) for node in nodes}

    @property
    def connected_nodes(self) -> frozenset[str]:
        """The nodes whose agents are connected."""
        return frozenset(self._connected)

    def heartbeats(self, state: State, now: float) -> list[Event]:
        """Return what the latest heartbeats add to the state of the live attempt."""
        attempt = state.attempt
        if attempt is None or not attempt.is_live or attempt.number != self._attempt:
            return []
        return [
            *self._phases(attempt),
            *self._overdue(attempt, now),
            *self._progress(state, attempt, now),
        ]

    def _phases(self, attempt: Attempt) -> list[Event]:
        if len(self._ranks) < attempt.world:
            return []
        found: list[Event] = []
        latest = tuple(self.ranks().values())
        steps = [report.step for report in latest]
        base = attempt.restore.step if attempt.restore else 0
        reached = {
            "restore": all(report.phase in STARTED for report in latest),
            "step": all(report.phase in STEPPING for report in latest),
            "first_step": min(steps) > base,
        }
        known = {
            "restore": attempt.restoring_at,
            "step": attempt.stepping_at,
            "first_step": attempt.first_step_at,
        }
        age_s = min(max(0.0, report.phase_age_s) for report in latest)
        for phase, is_reached in reached.items():
            mark = (phase, attempt.number)
            if is_reached and known[phase] is None and mark not in self._announced:
                self._announced.add(mark)
                found.append(
                    PhaseReached(attempt=attempt.number, phase=phase, step=min(steps), age_s=age_s)
                )
        return found

    def _overdue(self, attempt: Attempt, now: float) -> list[Event]:
        """Return the late ranks, by what their agents have seen: silence is no lateness."""
        beats = {
            rank: Beat(
                step=report.step,
                phase=report.phase,
                phase_since=now - report.phase_age_s,
                allowed_s=report.allowed_s,
            )
            for rank, report in self.ranks().items()
        }
        found: list[Event] = []
        for late in overdue(beats, now):
            mark = (f"overdue {late.rank}", late.step)
            if mark in self._announced or late.rank in attempt.exits:
                continue
            self._announced.add(mark)
            found.append(
                RankOverdue(
                    attempt=attempt.number,
                    node=attempt.node_of(late.rank),
                    rank=late.rank,
                    phase=late.phase,
                    step=late.step,
                    for_s=late.for_s,
                    why=self._ranks[late.rank][1].abnormal,
                )
            )
        return found

    def _progress(self, state: State, attempt: Attempt, now: float) -> list[Event]:
        if now < self._next_progress or len(self._ranks) < attempt.world:
            return []
        reports = [report for _, report in self._ranks.values()]
        event = Progress(
            attempt=attempt.number,
            min_step=min(report.step for report in reports),
            max_step=max(report.step for report in reports),
            loss=self._ranks[0][1].loss,
            step_s=_largest(report.step_s for report in reports),
            stall_s=_largest(report.stall_s for report in reports),
            saves=min(report.saves for report in reports),
            skipped_saves=max(report.skipped_saves for report in reports),
            tokens=max(report.tokens for report in reports),
            dropped_saves=max(report.dropped_saves for report in reports),
        )
        last = self._last_progress
        if last is not None and (last.min_step, last.saves) == (event.min_step, event.saves):
            return []
        if event.min_step < 0:
            return []
        self._last_progress = event
        # A run of weeks needs no line a second: the gap grows with the run's age.
        age_s = state.at - state.requested_at
        self._next_progress = now + min(max(PROGRESS_SHORTEST_S, age_s / 600), PROGRESS_LONGEST_S)
        return [event]


def _steps_in(seconds: float, step_s: float) -> int:
    return math.ceil(seconds / step_s) if step_s > 0 and math.isfinite(step_s) else 0


def _largest(values: Iterable[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)
