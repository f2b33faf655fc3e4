from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.actions import Prune, Restore, Source, StartRanks
from orchestrator.core.rules.retention import MOST_AT_ONCE, needed_places, prune
from orchestrator.core.state import State
from tests.unit.core.story import POLICY, Story

STEPS = tuple((step, 1) for step in range(100, 0, -10))


def planned(*places: tuple[int, int]) -> Story:
    story = Story().running(*STEPS).steps(105)
    return story.says(ev.RetentionPlanned(places=places))


def test_what_no_rule_keeps_is_deleted_oldest_first_and_chosen_by_nobody_from_then_on() -> None:
    story = planned((10, 1), (30, 1), (20, 1))
    decision = story.decides_one()
    assert decision.rule == "retention"
    assert decision.action == Prune(places=((10, 1), (20, 1), (30, 1)))
    assert not {(10, 1), (20, 1), (30, 1)} & set(story.state.commits)
    assert story.state.unkept == ()
    assert story.decides() == []
    story.done(decision, detail="3 checkpoints")
    assert (story.state.deleted, story.state.retention_problem) == (3, "")


def test_a_deletion_that_failed_is_a_problem_that_is_told_and_ends_nothing() -> None:
    story = planned((10, 1))
    decision = story.decides_one()
    story.done(decision, ok=False, detail="s3://b: no answer")
    assert (story.state.deleted, story.state.retention_problem) == (0, "s3://b: no answer")
    assert story.decides() == []
    # What is left in the store is found again after the next commit.
    story.says(ev.RetentionPlanned(places=((10, 1),)))
    again = story.decides_one()
    assert again.action == Prune(places=((10, 1),))
    assert again.key != decision.key
    assert story.done(again).state.retention_problem == ""


def test_the_newest_its_fallback_and_what_was_restored_stay_whatever_was_planned() -> None:
    story = planned(*STEPS)
    story.commits(110)
    restore = story.attempt.restore
    assert restore is not None
    assert restore.step == 100
    decision = story.decides_one()
    assert isinstance(decision.action, Prune)
    left = set(story.state.commits)
    assert left == {(110, 1), (100, 1), (90, 1)}  # 90 is what restoring 100 would fall back to


def test_a_restart_decided_before_keeps_what_it_restores() -> None:
    story = Story().running(*STEPS).steps(105)
    story.says(ev.QuarantineRead(places=((100, 1), (90, 1), (80, 1))))
    story.fails()
    (start,) = [d.action for d in story.decides() if isinstance(d.action, StartRanks)]
    assert start.restore is not None
    assert start.restore.step == 70
    story.says(ev.RetentionPlanned(places=STEPS))
    story.decides()
    assert {(70, 1), (60, 1)} <= set(story.state.commits)


def test_many_go_a_few_at_a_time() -> None:
    many = tuple((step, 1) for step in range(1, 3 * MOST_AT_ONCE))
    story = planned(*many)
    deleted = 0
    while decisions := story.decides():
        (decision,) = decisions
        assert isinstance(decision.action, Prune)
        assert len(decision.action.places) <= MOST_AT_ONCE
        deleted += len(decision.action.places)
        story.done(decision)
    assert deleted == len([p for p in many if p not in needed_places(story.state)])


places = st.tuples(st.integers(1, 12), st.integers(1, 3))


@given(
    commits=st.sets(places, max_size=12),
    bad=st.sets(places, max_size=6),
    unkept=st.sets(places, max_size=12),
    restored=st.none() | places,
)
def test_no_plan_takes_what_a_restart_needs(
    commits: set[tuple[int, int]],
    bad: set[tuple[int, int]],
    unkept: set[tuple[int, int]],
    restored: tuple[int, int] | None,
) -> None:
    story = Story().running().steps(20)
    restore = None
    if restored is not None:
        restore = Restore(step=restored[0], attempt=restored[1], source=Source.STORE)
    state: State = replace(
        story.state,
        commits=tuple(sorted(commits, reverse=True)),
        quarantined=frozenset((*p, Source.STORE.value) for p in bad),
        unkept=tuple(unkept),
        attempt=replace(story.attempt, restore=restore),
    )
    decision = prune(state, 0.0, POLICY)
    if decision is None:
        assert unkept <= needed_places(state)
        return
    assert isinstance(decision.action, Prune)
    gone = set(decision.action.places)
    usable = sorted(commits - bad, reverse=True)
    assert gone <= unkept
    assert not gone & set(usable[:2])
    assert restored not in gone
    if restored is not None:
        assert not gone & set([c for c in usable if c < restored][:1])
