"""Retention: what is never deleted, and that deleting today never takes what tomorrow wants."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing.retention import Candidate, RetentionPolicy, plan_retention

policies = st.builds(
    RetentionPolicy,
    keep_last=st.integers(0, 5),
    every_steps=st.sampled_from([0, 7, 100]),
    ages_s=st.sampled_from([0.0, 60.0, 3600.0]),
    ages_factor=st.integers(2, 4),
    average_last=st.integers(0, 6),
    average_every_steps=st.sampled_from([0, 5, 40]),
    average_every_tokens=st.sampled_from([0, 1000]),
    quarantined_s=st.sampled_from([0.0, 600.0]),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Candidate]:
    """Commits in the order in which they were made; attempts go back to earlier steps."""
    found, step, attempt, at, tokens = [], 0, 1, 1.7e9, 0
    for _ in range(draw(st.integers(0, 60))):
        if draw(st.integers(0, 9)) == 0:
            step, attempt = max(step - draw(st.integers(0, 30)), 0), attempt + 1
        step += draw(st.integers(1, 10))
        tokens = step * 100
        at += draw(st.floats(1, 2000))
        found.append(
            Candidate(
                step=step,
                attempt=attempt,
                committed_at=draw(st.sampled_from([at, at, at, None])),
                tokens=draw(st.sampled_from([tokens, None])),
                quarantined=draw(st.integers(0, 9)) == 0,
            )
        )
    return found


@settings(deadline=None)
@given(histories(), policies, st.data())
def test_what_must_stay_stays(
    history: list[Candidate], policy: RetentionPolicy, data: st.DataObject
) -> None:
    places = [commit.place for commit in history]
    in_use = set(data.draw(st.lists(st.sampled_from(places), max_size=2))) if places else set()
    now = 1.7e9 + 200_000
    plan = plan_retention(history, now, policy, in_use)
    kept = [verdict.place for verdict in plan.keep]
    deleted = [verdict.place for verdict in plan.delete]
    assert sorted(kept + deleted) == sorted(places)
    assert kept == sorted(kept, reverse=True)
    assert all(verdict.why for verdict in (*plan.keep, *plan.delete))
    usable = sorted((c.place for c in history if not c.quarantined), reverse=True)
    assert set(usable[:2]) <= set(kept)
    assert in_use <= set(kept)
    steps: list[int] = []
    for step, _ in usable:
        if step not in steps:
            steps.append(step)
    assert set(steps[: policy.keep_last]) <= {step for step, _ in kept}
    again = plan_retention([c for c in history if c.place in kept], now, policy, in_use)
    assert again.delete == ()


@settings(max_examples=60, deadline=None)
@given(histories(), policies)
def test_pruning_after_every_commit_keeps_what_pruning_once_would(
    history: list[Candidate], policy: RetentionPolicy
) -> None:
    history = [
        c for n, c in enumerate(history) if c.step > max([0, *(h.step for h in history[:n])])
    ]
    now = 1.7e9 + 200_000
    once = {verdict.place for verdict in plan_retention(history, now, policy).keep}
    left: list[Candidate] = []
    for commit in history:
        left.append(commit)
        plan = plan_retention(left, now, policy)
        gone = {verdict.place for verdict in plan.delete}
        left = [c for c in left if c.place not in gone]
    assert once == {c.place for c in left}


@settings(deadline=None)
@given(st.integers(1, 400), st.sampled_from([60.0, 600.0]), st.integers(2, 4))
def test_there_is_something_from_before_at_any_distance_and_it_is_not_much(
    count: int, ages_s: float, factor: int
) -> None:
    policy = RetentionPolicy(keep_last=1, ages_s=ages_s, ages_factor=factor)
    start, every = 1.7e9, 50.0
    history = [
        Candidate(step=n, attempt=1, committed_at=start + n * every) for n in range(1, count + 1)
    ]
    now = start + count * every
    plan = plan_retention(history, now, policy)
    ages = sorted(now - (start + verdict.place[0] * every) for verdict in plan.keep)
    oldest = (count - 1) * every
    wanted = ages_s
    while wanted < oldest:
        reach = max(2 * factor * wanted, wanted + 2 * ages_s) + every
        assert any(wanted <= age <= reach for age in ages) or oldest < reach
        wanted *= 1.5
    assert oldest in ages
    spans = 2
    while ages_s * factor**spans < 2 * max(oldest, 1.0):
        spans += 1
    assert len(plan.keep) <= 2 * (spans + 1) + 3


def test_reasons_are_told() -> None:
    history = [
        Candidate(step=100, attempt=1, committed_at=0.0),
        Candidate(step=200, attempt=1, committed_at=10.0),
        Candidate(step=250, attempt=1, committed_at=11.0),
        Candidate(step=300, attempt=1, committed_at=20.0, quarantined=True),
        Candidate(step=300, attempt=2, committed_at=30.0),
        Candidate(step=400, attempt=1, committed_at=40.0),
        Candidate(step=400, attempt=2, committed_at=50.0),
        Candidate(step=500, attempt=2, committed_at=60.0),
    ]
    policy = RetentionPolicy(keep_last=1, every_steps=200, ages_s=0, quarantined_s=100.0)
    plan = plan_retention(history, 1000.0, policy, in_use={(250, 1)})
    assert {v.place: v.why for v in plan.keep} == {
        (500, 2): "the newest, one of the last 1",
        (400, 2): "the fallback of the newest, the first of 200 steps",
        (250, 1): "in use",
        (200, 1): "the first of 200 steps",
        (100, 1): "the first of 200 steps",
    }
    assert {v.place: v.why for v in plan.delete} == {
        (400, 1): "attempt 2 has committed the same step",
        (300, 2): "no rule keeps it",
        (300, 1): "in quarantine for more than 1.66667 min",
    }


@pytest.mark.parametrize(
    "wrong",
    [{"keep_last": -1}, {"ages_factor": 1}, {"ages_s": float("nan")}, {"quarantined_s": -1.0}],
)
def test_a_policy_without_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="retention"):
        RetentionPolicy(**wrong)  # type: ignore[arg-type]
