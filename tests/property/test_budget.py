"""The budget of a node: whatever happens and whenever, its promises hold."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing.store.budget import Budget, Rate, Slowness

MIB = float(1 << 20)
_gaps = st.floats(0, 3, allow_nan=False)
_takes = st.tuples(_gaps, st.integers(1, 1 << 20), st.sampled_from(["take", "cut", "late"]))


@settings(deadline=None)
@given(st.lists(_takes, min_size=1, max_size=120), st.floats(1e5, 1e8))
def test_over_any_span_no_more_than_the_cap_is_used(
    takes: list[tuple[float, int, str]], cap: float
) -> None:
    rate, now, used = Rate(cap=cap, floor=4 * MIB), 0.0, []
    for gap, amount, what in takes:
        now += gap
        if what != "take":
            rate.cut(0.5 if what == "cut" else 0.7, now)
        used.append((now + rate.take(amount, now), amount))
        assert 0 < rate.limit <= cap
    used.sort()
    for first in range(len(used)):
        total = 0
        for at, amount in used[first:]:
            total += amount
            span = at - used[first][0]
            assert total - amount <= cap * (span + 0.26) + used[first][1]


@settings(deadline=None)
@given(st.lists(_takes, min_size=1, max_size=120), st.one_of(st.none(), st.floats(1e5, 1e9)))
def test_the_limit_never_falls_so_low_that_an_upload_could_not_end(
    takes: list[tuple[float, int, str]], cap: float | None
) -> None:
    budget, now = Budget(max_bytes_per_s=cap), 0.0
    for gap, amount, what in takes:
        now += gap
        wait = budget.nbytes.take(amount, now)
        assert wait <= 120 * (1 << 20) / min(4 * MIB, cap or inf) + 1
        if what == "cut":
            budget.throttled(now)
        elif what == "late":
            budget.late(now)
        assert budget.nbytes.limit >= min(4 * MIB, cap or inf)
        assert budget.requests.limit >= 2


@settings(deadline=None)
@given(st.floats(1, 2000), st.integers(1, 30))
def test_after_a_storm_the_budget_opens_again(mib_per_s: float, storm_s: int) -> None:
    budget, now = Budget(), 0.0
    for _ in range(40):  # what the line takes when nothing is wrong
        now += 0.1
        budget.nbytes.take(mib_per_s * MIB / 10, now)
    for _ in range(10 * storm_s):
        now += 0.1
        budget.nbytes.take(1, now)
        budget.throttled(now)
    assert budget.bound
    assert budget.nbytes.limit <= max(0.7 * mib_per_s, 6.2) * MIB, "half, and a second of growth"
    for _ in range(600):
        now += 0.1
        budget.nbytes.take(1, now)
    assert not budget.bound, "a minute later nothing is held back any more"


@settings(deadline=None)
@given(st.integers(2, 50))
def test_the_many_answers_to_one_overload_are_one_decrease(answers: int) -> None:
    budget = Budget()
    for at in range(20):
        budget.nbytes.take(10 * MIB, at / 10)
    budget.throttled(2.0)
    once = budget.nbytes.limit
    for _ in range(answers):
        budget.throttled(2.0)
    assert budget.nbytes.limit == once


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 1.9), min_size=1, max_size=200))
def test_ordinary_noise_is_no_congestion(noise: list[float]) -> None:
    slowness = Slowness()
    for factor in noise:
        assert not slowness.add(factor, 16 << 20, 8)


def test_answers_that_take_much_longer_than_usual_are_noticed_and_become_usual() -> None:
    slowness = Slowness()
    for _ in range(64):
        assert not slowness.add(1.0, 16 << 20, 8)
    slow = [slowness.add(10.0, 16 << 20, 8) for _ in range(200)]
    assert any(slow[:8])
    assert not any(slow[64:])


def test_more_requests_on_one_line_are_no_congestion() -> None:
    slowness = Slowness()
    for in_flight in [1] * 30 + [8] * 30:
        assert not slowness.add(1.0 * in_flight, 16 << 20, in_flight)


def test_a_waiting_requests_budget_is_its_own() -> None:
    budget = Budget(max_requests_per_s=10)
    waits = [budget.requests.take(1, 5.0) for _ in range(20)]
    assert waits == sorted(waits)
    assert 1.0 < waits[-1] < 2.1
    assert budget.nbytes.take(1 << 30, 5.0) == 0
