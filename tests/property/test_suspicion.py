"""Patience with a silent node, for every past: never less for more jitter, always within bounds."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.supervisor.suspicion import (
    KEPT_GAPS,
    KEPT_PEAKS,
    PEAK_S,
    Limits,
    Rhythm,
    patience_s,
)

T = 1000.0
gaps = st.lists(st.floats(0.0, 120.0), max_size=80)
limits = st.builds(
    lambda beat, factor: Limits(heartbeat_s=beat, agent_lost_s=beat * factor),
    st.floats(0.01, 60.0),
    st.floats(1.01, 1000.0),
)
default = Limits(heartbeat_s=0.5, agent_lost_s=15.0)


def lived(past: list[float], its: Limits) -> tuple[Rhythm, float]:
    """The rhythm of a node that was heard after each of these gaps, and the time then."""
    now, rhythm = T, Rhythm.begun(T)
    for gap in past:
        now += gap
        rhythm = rhythm.heard(now, its)
    return rhythm, now


@given(gaps, gaps, st.floats(0, 120), st.floats(0, 120), limits)
def test_more_jitter_never_makes_it_quicker(
    past: list[float], more: list[float], longest: float, longer: float, its: Limits
) -> None:
    worse = [gap + extra for gap, extra in zip(past, [*more, *[0.0] * len(past)], strict=False)]
    before, after = patience_s(past, longest, its), patience_s(worse, longest + longer, its)
    assert after >= before - 1e-9 * (1 + before)


@given(gaps, limits)
def test_it_is_never_before_the_floor_and_never_after_agent_lost_s(
    past: list[float], its: Limits
) -> None:
    rhythm, now = lived(past, its)
    for later in (0.0, 1.0, 1e6):
        patience = rhythm.patience_s(now + later, its)
        assert its.floor_s <= patience <= its.agent_lost_s


@given(gaps, st.data(), limits)
def test_a_node_whose_gaps_reached_g_is_not_suspected_before_g(
    past: list[float], data: Any, its: Limits
) -> None:
    rhythm, now = lived(past, its)
    within = [gap for n, gap in enumerate(past) if sum(past[n:]) < PEAK_S * (KEPT_PEAKS - 1)]
    later = data.draw(st.floats(0.0, max(0.0, PEAK_S * (KEPT_PEAKS - 1) - sum(past))))
    for gap in within:
        patience = rhythm.patience_s(now + (later if len(within) == len(past) else 0.0), its)
        assert patience >= min(gap, its.agent_lost_s) - 1e-6


@given(st.floats(0.6, 8.0), st.integers(1, 400))
def test_a_late_heartbeat_is_remembered_for_minutes_and_not_for_ever(
    late_s: float, punctual: int
) -> None:
    rhythm, now = lived([late_s, *[0.5] * punctual], default)
    if punctual * 0.5 < (KEPT_PEAKS - 1) * PEAK_S:
        assert rhythm.patience_s(now, default) >= 1.5 * late_s - 1e-6
    rhythm, now = lived([late_s, *[0.5] * (2 * int(PEAK_S) * KEPT_PEAKS)], default)
    assert rhythm.patience_s(now, default) == default.floor_s


@given(gaps, st.integers(1, 300))
def test_a_burst_of_facts_forgets_no_gap(past: list[float], burst: int) -> None:
    rhythm, now = lived(past, default)
    before = rhythm.patience_s(now, default)
    for _ in range(burst):
        now += 1e-4
        rhythm = rhythm.heard(now, default)
    assert rhythm.patience_s(now, default) >= before - 1e-6


@given(gaps, limits)
def test_what_is_remembered_is_bounded(past: list[float], its: Limits) -> None:
    rhythm, _ = lived(past, its)
    assert len(rhythm.gaps) <= KEPT_GAPS
    assert len(rhythm.peaks) <= KEPT_PEAKS


@given(gaps, st.floats(0.0, 100.0))
def test_time_in_which_nobody_listened_is_no_silence(past: list[float], away_s: float) -> None:
    rhythm, now = lived(past, default)
    moved = rhythm.moved(away_s, now + away_s)
    assert now + away_s - moved.last <= 1e-6
    assert moved.patience_s(now, default) == rhythm.patience_s(now, default)
