import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.interval import (
    Binding,
    Costs,
    GammaRate,
    TunerInputs,
    choose,
    coalesce,
    optimum_s,
    waste,
)

FLEET = Costs(stall_s=3, upload_s=120, slowdown=0.03, restart_s=600)
RATE = 128 * 6.5 / 1000 / 86_400
INPUTS = TunerInputs(
    step_s=1.0,
    stall_s=3.0,
    upload_s=120.0,
    slowdown=0.03,
    restart_s=600.0,
    faults=0,
    exposure_node_s=0,
    nodes=128,
    prior_per_1000_node_days=6.5,
)


@pytest.mark.parametrize(
    ("interval_s", "goodput"), [(300, 0.9696), (600, 0.9792), (1200, 0.9818), (3600, 0.9739)]
)
def test_waste_agrees_with_the_worked_example(interval_s: float, goodput: float) -> None:
    assert 1 - waste(interval_s, FLEET, RATE) == pytest.approx(goodput, abs=5e-5)


@given(st.floats(1, 1e5), st.floats(1e-8, 1e-2))
def test_no_allowed_interval_loses_less_than_the_optimum(other: float, rate: float) -> None:
    best = optimum_s(FLEET, rate)
    allowed = max(other, FLEET.floor_s)
    assert waste(best, FLEET, rate) <= waste(allowed, FLEET, rate) + 1e-12


def test_the_posterior_starts_at_the_prior_and_follows_the_data() -> None:
    prior = GammaRate.prior(20, weight=2)
    assert prior.mean_per_node_s * 86_400 * 1000 == pytest.approx(20)
    quiet = prior.observe(0, 1000 * 86_400)
    loud = prior.observe(100, 1000 * 86_400)
    assert quiet.mean_per_node_s < prior.mean_per_node_s < loud.mean_per_node_s


def test_forgetting_leads_back_to_the_prior_and_never_below() -> None:
    prior = GammaRate.prior(20)
    loud = prior.observe(100, 86_400)
    half = loud.forget(3 * 86_400)
    assert half.events == pytest.approx(52)
    assert loud.forget(1e9).mean_per_node_s == pytest.approx(prior.mean_per_node_s)


def test_bursts_are_one_incident() -> None:
    assert coalesce([0, 10, 500, 2000, 2001]) == (0, 2000)
    assert coalesce([]) == ()
    assert coalesce([0, 800, 1600, 2400]) == (0,)


def test_the_first_choice_is_the_optimum() -> None:
    choice = choose(INPUTS)
    assert choice.binding is Binding.OPTIMUM
    assert choice.move
    assert choice.interval_steps == round(optimum_s(FLEET, RATE))
    assert choice.goodput == pytest.approx(1 - waste(choice.interval_steps, FLEET, RATE))


def test_a_move_is_at_most_a_factor_of_two() -> None:
    best = choose(INPUTS).interval_steps
    assert choose(replace(INPUTS, interval_steps=best // 10)).interval_steps == best // 10 * 2
    assert choose(replace(INPUTS, interval_steps=best * 10)).interval_steps == best * 5


def test_inside_the_hysteresis_nothing_moves() -> None:
    best = choose(INPUTS).interval_steps
    choice = choose(replace(INPUTS, interval_steps=round(best * 1.15)))
    assert not choice.move
    assert "kept" in choice.reason


def test_an_upload_that_is_slower_than_the_optimum_binds_and_says_so() -> None:
    choice = choose(replace(INPUTS, slowdown=0, upload_s=5000))
    assert choice.binding is Binding.UPLOAD
    assert choice.interval_steps >= 5003
    assert "twice the bandwidth saves" in choice.reason


def test_an_interval_below_the_upload_time_is_left_at_once() -> None:
    choice = choose(replace(INPUTS, slowdown=0, upload_s=5000, interval_steps=4500))
    assert choice.move
    assert choice.interval_steps >= 5003


def test_caps_bind() -> None:
    lost = choose(replace(INPUTS, max_lost_work_s=600))
    assert lost.binding is Binding.LOST_WORK
    assert lost.interval_steps == 480
    dear = choose(replace(INPUTS, max_overhead=0.001))
    assert dear.binding is Binding.OVERHEAD
    assert 6.6 / dear.interval_steps <= 0.001


@pytest.mark.parametrize("overhead", [0.0, 1e-300])
def test_a_cap_that_no_save_can_meet_is_still_a_number_of_steps(overhead: float) -> None:
    choice = choose(replace(INPUTS, max_overhead=overhead))
    assert choice.binding is Binding.OVERHEAD
    assert 10**9 < choice.interval_steps < 2**63


def test_what_is_not_measured_changes_nothing() -> None:
    for field in ("step_s", "stall_s", "upload_s", "slowdown", "restart_s"):
        choice = choose(replace(INPUTS, **{field: math.nan}, interval_steps=17))
        assert choice.interval_steps == 17
        assert not choice.move
        assert choice.binding is Binding.NOT_MEASURED


@given(
    st.builds(
        TunerInputs,
        step_s=st.floats(1e-4, 1e3),
        stall_s=st.floats(0, 1e3),
        upload_s=st.floats(0, 1e5),
        slowdown=st.floats(0, 1),
        restart_s=st.floats(0, 1e5),
        faults=st.floats(0, 1e4),
        exposure_node_s=st.floats(0, 1e10),
        nodes=st.integers(1, 10**5),
        prior_per_1000_node_days=st.floats(1e-3, 1e4),
        max_overhead=st.sampled_from([0.01, math.inf]),
        max_lost_work_s=st.sampled_from([60.0, 3600.0, math.inf]),
        interval_steps=st.integers(0, 10**7),
    )
)
def test_any_measurement_gives_a_choice_within_the_rules(inputs: TunerInputs) -> None:
    choice = choose(inputs)
    assert choice.interval_steps >= 1
    assert 0 <= choice.goodput <= 1
    assert choice.move == (choice.interval_steps != inputs.interval_steps)
    if inputs.interval_steps:
        assert inputs.interval_steps / 2 <= choice.interval_steps <= 2 * inputs.interval_steps
    assert "\n" not in choice.reason


def test_repeated_choices_settle() -> None:
    steps = 3
    for _ in range(40):
        steps = choose(replace(INPUTS, interval_steps=steps)).interval_steps
    assert not choose(replace(INPUTS, interval_steps=steps)).move
    assert steps == pytest.approx(optimum_s(FLEET, RATE), rel=0.21)


# A save in memory every 50 steps stalls for 3 of 50 seconds: 6 %.
TIERED = replace(INPUTS, memory_steps=50, interval_steps=600)


def test_saves_in_memory_cost_goodput_and_are_said() -> None:
    alone, tiered = choose(replace(TIERED, memory_steps=0)), choose(TIERED)
    assert tiered.interval_steps == alone.interval_steps
    more = 3 / 50 - 3 / alone.interval_steps
    assert alone.goodput - tiered.goodput == pytest.approx(more)
    assert "saves in memory every 50 steps take 6.0%" in tiered.reason
    assert "memory" not in alone.reason


def test_saves_in_memory_above_the_largest_share_are_named_as_the_reason() -> None:
    limited = choose(replace(TIERED, max_overhead=0.02))
    assert "more than the 2.0% wanted: only fewer of them help" in limited.reason
    assert "more than" not in choose(replace(TIERED, max_overhead=0.07)).reason


def test_an_interval_longer_than_memorys_keeps_no_more_stalls_away() -> None:
    """Under 1 % alone it would be 660 s; of that the uploads need 360 s at 1 % left of 7 %."""
    dear = replace(TIERED, faults=50, exposure_node_s=128 * 86_400.0, interval_steps=0)
    alone = choose(replace(dear, memory_steps=0, max_overhead=0.01))
    assert (alone.interval_steps, alone.binding) == (660, Binding.OVERHEAD)
    beside = choose(replace(dear, max_overhead=0.07))
    assert beside.interval_steps < 400
    assert beside.binding is not Binding.LOST_WORK


@given(st.integers(1, 2000), st.integers(0, 2000), st.floats(0.001, 0.9))
def test_goodput_is_a_share_whatever_memory_takes(steps: int, memory: int, most: float) -> None:
    choice = choose(replace(INPUTS, interval_steps=steps, memory_steps=memory, max_overhead=most))
    assert 0 <= choice.goodput <= 1
