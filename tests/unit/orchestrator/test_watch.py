"""The clock here is a number: nothing sleeps."""

import math
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import Restore, Source
from orchestrator.core.node import Node
from orchestrator.core.state import Attempt, AttemptPhase, RunPhase, State
from orchestrator.supervisor.liveness import RETURN_S
from orchestrator.supervisor.probe import Answer, Answered
from orchestrator.supervisor.suspicion import Limits
from orchestrator.supervisor.watch import PROGRESS_LONGEST_S, PROGRESS_SHORTEST_S, Watch
from orchestrator.wire import RankReport, Report

T = 1000.0
LIMIT_S = 15.0
LIMITS = Limits(heartbeat_s=0.5, agent_lost_s=LIMIT_S)


def node(name: str, **changes: Any) -> Node:
    made = Node(name=name, incarnation="i1", alive=True, address="", metrics_url="", joined_seq=1)
    return replace(made, **changes)


def running(**changes: Any) -> State:
    """Two nodes with one rank each, attempt 2 under way, and a spare."""
    attempt = Attempt(
        number=2,
        nodes=("n0", "n1"),
        ranks_per_node=1,
        restore=None,
        phase=AttemptPhase.RUNNING,
        ordered_at=0.0,
        ordered_seq=1,
    )
    nodes = {name: node(name) for name in ("n0", "n1", "n2")}
    return State(attempt=replace(attempt, **changes), nodes=nodes)


def rank(number: int, **changes: Any) -> RankReport:
    made = RankReport(
        rank=number,
        step=3,
        phase="step",
        phase_age_s=0.0,
        allowed_s=10.0,
        loss=2.0 + number,
        step_s=0.1,
        stall_s=math.nan,
        saves=0,
        skipped_saves=0,
        tokens=100,
    )
    return replace(made, **changes)


def watching(*reports: RankReport, attempt: int = 2, now: float = T) -> Watch:
    watch = Watch(T - 100, LIMITS)
    for report in reports:
        watch.reported(f"n{report.rank}", Report(attempt=attempt, ranks=(report,)), now)
    return watch


def of(events: list[ev.Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_phase_is_reached_when_all_ranks_are_in_it() -> None:
    watch = watching(rank(0, phase="step", step=-1), rank(1, phase="init", step=-1))
    assert not watch.heartbeats(running(), T)
    watch.reported("n1", Report(attempt=2, ranks=(rank(1, phase="restore", step=-1),)), T)
    phases = of(watch.heartbeats(running(), T), ev.PhaseReached)
    assert [phase.phase for phase in phases] == ["restore"]
    watch.reported("n1", Report(attempt=2, ranks=(rank(1, phase="step", step=-1),)), T)
    phases = of(watch.heartbeats(running(), T), ev.PhaseReached)
    assert [phase.phase for phase in phases] == ["step"]


def test_the_first_step_is_one_behind_the_checkpoint_and_by_all_ranks() -> None:
    state = running(restore=Restore(step=40, attempt=1, source=Source.STORE))
    watch = watching(rank(0, step=41), rank(1, step=40))
    assert "first_step" not in [e.phase for e in of(watch.heartbeats(state, T), ev.PhaseReached)]
    watch.reported("n1", Report(attempt=2, ranks=(rank(1, step=41),)), T)
    phases = of(watch.heartbeats(state, T), ev.PhaseReached)
    assert [(e.phase, e.step) for e in phases] == [("first_step", 41)]


def test_a_phase_is_told_once_and_with_its_age() -> None:
    watch = watching(rank(0, phase_age_s=3.0), rank(1, phase_age_s=0.5))
    phases = of(watch.heartbeats(running(), T), ev.PhaseReached)
    assert [phase.phase for phase in phases] == ["restore", "step", "first_step"]
    assert {phase.age_s for phase in phases} == {0.5}
    assert not of(watch.heartbeats(running(), T + 1), ev.PhaseReached)


def test_a_phase_that_is_in_the_journal_is_not_told_again_by_the_next_supervisor() -> None:
    watch = watching(rank(0), rank(1))
    state = running(restoring_at=1.0, stepping_at=2.0, first_step_at=3.0)
    assert not of(watch.heartbeats(state, T), ev.PhaseReached)


@pytest.mark.parametrize("phase", [AttemptPhase.OVER])
def test_an_ended_attempt_has_no_heartbeats(phase: AttemptPhase) -> None:
    watch = watching(rank(0), rank(1))
    assert not watch.heartbeats(running(phase=phase), T)
    assert not watch.heartbeats(State(), T)


def test_reports_of_an_older_attempt_are_left_out() -> None:
    watch = watching(rank(0), rank(1))
    watch.reported("n0", Report(attempt=1, ranks=(rank(0, step=99),)), T)
    assert watch.ranks()[0].step == 3
    watch.reported("n2", Report(attempt=0, ranks=()), T)
    assert set(watch.ranks()) == {0, 1}


def test_a_newer_attempt_begins_with_nothing_known() -> None:
    watch = watching(rank(0), rank(1))
    watch.heartbeats(running(), T)
    watch.reported("n0", Report(attempt=3, ranks=(rank(0, step=1),)), T)
    assert set(watch.ranks()) == {0}
    watch.reported("n1", Report(attempt=3, ranks=(rank(1, step=1),)), T)
    events = watch.heartbeats(running(number=3), T)
    assert [e.attempt for e in of(events, ev.PhaseReached)] == [3, 3, 3]


def test_an_order_is_for_a_step_that_no_rank_reaches_before_it() -> None:
    assert Watch(T, LIMITS).step_ahead(T) == 1, "the first step is still to come"
    slow = watching(rank(0, step=5, step_s=60.0), rank(1, step=6, step_s=60.0))
    assert slow.step_ahead(T) == 6 + 2 + 1
    fast = watching(rank(0, step=50, step_s=0.01), rank(1, step=51, step_s=math.nan))
    assert fast.step_ahead(T + 0.5) >= 50 + 2 + 150, "it went on since its last report"
    unknown = watching(rank(0, step=5, step_s=math.nan))
    assert unknown.step_ahead(T) == 7


def test_a_rank_is_overdue_when_its_phase_takes_too_long() -> None:
    watch = watching(rank(0, phase_age_s=9.9), rank(1))
    assert not of(watch.heartbeats(running(), T), ev.RankOverdue)
    watch.reported("n0", Report(attempt=2, ranks=(rank(0, phase_age_s=10.5),)), T + 0.6)
    late = of(watch.heartbeats(running(), T + 0.7), ev.RankOverdue)
    assert [(e.rank, e.node, e.phase, e.step) for e in late] == [(0, "n0", "step", 3)]
    assert late[0].for_s == pytest.approx(0.5)


def test_a_rank_of_a_silent_agent_is_unknown_and_not_late() -> None:
    watch = watching(rank(0, phase_age_s=9.9), rank(1))
    assert not of(watch.heartbeats(running(), T + 1000), ev.RankOverdue)


def test_a_rank_is_overdue_once_per_step() -> None:
    watch = watching(rank(0, phase_age_s=11.0), rank(1))
    assert len(of(watch.heartbeats(running(), T), ev.RankOverdue)) == 1
    assert not of(watch.heartbeats(running(), T + 5), ev.RankOverdue)
    watch.reported("n0", Report(attempt=2, ranks=(rank(0, step=4, phase_age_s=11.0),)), T + 6)
    assert len(of(watch.heartbeats(running(), T + 6), ev.RankOverdue)) == 1


@pytest.mark.parametrize("allowed_s", [math.nan, math.inf])
def test_a_phase_without_a_bound_is_never_overdue(allowed_s: float) -> None:
    watch = watching(rank(0, phase_age_s=1e6, allowed_s=allowed_s), rank(1))
    assert not of(watch.heartbeats(running(), T), ev.RankOverdue)


def test_a_rank_that_has_ended_is_not_late() -> None:
    watch = watching(rank(0, phase_age_s=11.0), rank(1))
    assert not of(watch.heartbeats(running(exits={0: 0}), T), ev.RankOverdue)


def test_what_is_wrong_with_a_late_process_is_told() -> None:
    watch = watching(rank(0, phase_age_s=11.0, abnormal="process is stopped"), rank(1))
    assert of(watch.heartbeats(running(), T), ev.RankOverdue)[0].why == "process is stopped"


def test_progress_is_told_now_and_then_and_only_when_there_is_some() -> None:
    watch = watching(rank(0, step=5, tokens=70), rank(1, step=4, tokens=80, loss=9.0))
    told = of(watch.heartbeats(running(), T), ev.Progress)
    assert [(e.min_step, e.max_step, e.loss, e.tokens) for e in told] == [(4, 5, 2.0, 80)]
    later = T + PROGRESS_LONGEST_S
    assert not of(watch.heartbeats(running(), later), ev.Progress), "no new step"
    for number in (0, 1):
        watch.reported(f"n{number}", Report(attempt=2, ranks=(rank(number, step=6),)), later)
    assert len(of(watch.heartbeats(running(), later), ev.Progress)) == 1
    for number in (0, 1):
        watch.reported(f"n{number}", Report(attempt=2, ranks=(rank(number, step=7),)), later)
    soon = later + PROGRESS_SHORTEST_S / 2
    assert not of(watch.heartbeats(running(), soon), ev.Progress), "too soon"
    assert of(watch.heartbeats(running(), later + PROGRESS_SHORTEST_S), ev.Progress)


def test_a_long_run_tells_its_progress_more_rarely() -> None:
    state = replace(running(), requested_at=0.0, at=1e9)
    watch = watching(rank(0), rank(1))
    assert of(watch.heartbeats(state, T), ev.Progress)
    for number in (0, 1):
        watch.reported(f"n{number}", Report(attempt=2, ranks=(rank(number, step=9),)), T)
    assert not of(watch.heartbeats(state, T + PROGRESS_LONGEST_S - 0.1), ev.Progress)
    assert of(watch.heartbeats(state, T + PROGRESS_LONGEST_S + 0.1), ev.Progress)


def test_a_save_is_progress_without_a_step() -> None:
    watch = watching(rank(0), rank(1))
    assert of(watch.heartbeats(running(), T), ev.Progress)
    for number in (0, 1):
        report = rank(number, saves=1, stall_s=0.2 + number)
        watch.reported(f"n{number}", Report(attempt=2, ranks=(report,)), T + 20)
    (told,) = of(watch.heartbeats(running(), T + 20), ev.Progress)
    assert (told.saves, told.stall_s) == (1, 1.2)


def test_progress_waits_for_every_rank_and_for_the_first_step() -> None:
    assert not of(watching(rank(0)).heartbeats(running(), T), ev.Progress)
    watch = watching(rank(0, step=-1), rank(1))
    assert not of(watch.heartbeats(running(), T), ev.Progress)


def test_what_no_rank_measured_is_not_measured() -> None:
    watch = watching(rank(0, step_s=math.nan), rank(1, step_s=math.nan))
    (told,) = of(watch.heartbeats(running(), T), ev.Progress)
    assert math.isnan(told.step_s)
    assert math.isnan(told.stall_s)


def looking(watch: Watch, state: State, start: float, end: float) -> list[ev.AgentLost]:
    """Look again and again, as the supervisor's loop does; what was found last."""
    found: list[ev.Event] = []
    now = start
    while now < end and not found:
        now = min(end, now + 0.1)
        found, _ = watch.silent(state, now)
    return of(found, ev.AgentLost)


def test_an_agent_is_lost_when_it_says_nothing_for_too_long() -> None:
    watch = Watch(T, LIMITS)
    for name in ("n0", "n1", "n2"):
        watch.connected(name, T)
    assert not looking(watch, running(), T, T + 10)
    watch.alive("n0", T + 10)
    lost = looking(watch, running(), T + 10, T + LIMIT_S + 1)
    assert [e.node for e in lost] == ["n1", "n2"]
    assert lost[0].silent_s == pytest.approx(LIMIT_S, abs=0.2)
    assert lost[0].incarnation == "i1"
    assert lost[0].why.startswith("silent for 15.")


def test_a_heartbeat_is_a_sign_of_life() -> None:
    watch = Watch(T, LIMITS)
    state = replace(running(), nodes={"n0": node("n0")})
    assert not looking(watch, state, T, T + 10)
    watch.reported("n0", Report(attempt=2, ranks=(rank(0),)), T + 10)
    assert not looking(watch, state, T + 10, T + 20)


def test_a_new_supervisor_gives_agents_time_to_come_back() -> None:
    watch = Watch(T, LIMITS)
    assert not looking(watch, running(), T, T + LIMIT_S + RETURN_S - 1)
    assert (
        len(looking(watch, running(), T + LIMIT_S + RETURN_S - 1, T + LIMIT_S + RETURN_S + 1)) == 3
    )


def test_a_lost_agent_is_not_lost_again() -> None:
    state = replace(running(), nodes={"n0": node("n0", alive=False)})
    assert not looking(Watch(T, LIMITS), state, T, T + 100)


def test_a_supervisor_that_was_away_itself_calls_nobody_silent_or_late() -> None:
    watch = Watch(T, LIMITS)
    watch.connected("n0", T)
    for number in (0, 1):
        watch.reported(f"n{number}", Report(attempt=2, ranks=(rank(number),)), T)
    assert not watch.silent(running(), T + 60)[0]
    assert not looking(watch, running(), T + 60, T + 60 + LIMIT_S - 1)
    assert not of(watch.heartbeats(running(), T + 60), ev.RankOverdue)
    assert looking(watch, running(), T + 60 + LIMIT_S - 1, T + 60 + LIMIT_S + 1)
    assert watch.step_ahead(T + 60) > 600, "the ranks did not stand still"


def with_ports(**changes: Any) -> State:
    """The nodes' agents have ports to be asked at."""
    nodes = {
        f"n{n}": node(f"n{n}", metrics_url=f"http://10.0.0.{n}:9100/metrics") for n in range(3)
    }
    return replace(running(), nodes=nodes, **changes)


def test_an_agent_that_parts_is_asked_about_at_once_and_lost_when_refused() -> None:
    watch = Watch(T, LIMITS)
    for name in ("n0", "n1", "n2"):
        watch.connected(name, T)
    _, probes = watch.silent(with_ports(), T + 0.1)
    for probe in probes:
        watch.answered(Answered(probe=probe, answer=Answer.CONNECTED), T + 0.1)
    watch.disconnected("n1", T + 0.2)
    lost, probes = watch.silent(with_ports(), T + 0.25)
    assert not lost
    assert [(probe.node, probe.address) for probe in probes] == [("n1", ("10.0.0.1", 9100))]
    watch.answered(Answered(probe=probes[0], answer=Answer.REFUSED), T + 0.3)
    assert watch.silent_s(["n1"], T + 0.3) == {"n1": pytest.approx(0.1)}
    (gone,) = of(watch.silent(with_ports(), T + 0.3)[0], ev.AgentLost)
    assert gone.silent_s == pytest.approx(0.1), "it was there until it parted"


def test_nobody_is_asked_while_the_run_ends() -> None:
    watch = Watch(T, LIMITS)
    watch.connected("n1", T)
    watch.disconnected("n1", T)
    assert watch.silent(with_ports(phase=RunPhase.FINISHING), T + 0.1) == ([], [])
