import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import Quarantine, Source, StartRanks
from tests.unit.core.story import Story

DAMAGED = "checkpoint_damaged"


def restored(*commits: tuple[int, int]) -> Story:
    """The first attempt starts from the newest of these in the store."""
    story = Story().running(*commits)
    assert story.attempt.restore is not None
    assert story.attempt.restore.source is Source.STORE
    return story


def fails_to_restore(story: Story, code: int, note: str) -> Story:
    story.exits(1, code=code, note=note)
    story.decides()
    return story.stops().judged("restore_failed", "storage")


def test_a_damaged_checkpoint_is_put_into_quarantine_and_the_one_before_is_used() -> None:
    story = fails_to_restore(restored((20, 3), (10, 2)), 79, DAMAGED)
    first, then = story.decides()
    assert first.rule == "quarantine"
    assert isinstance(first.action, Quarantine)
    assert (first.action.step, first.action.attempt) == (20, 3)
    assert first.action.found_by == story.attempt.number - 1
    assert isinstance(then.action, StartRanks)
    assert then.action.restore is not None
    assert then.action.restore.step == 10
    assert story.done(first).decides() == []
    assert story.state.in_quarantine == {(20, 3)}


@pytest.mark.parametrize(("code", "note"), [(77, "restore_failed"), (1, "")])
def test_a_store_that_did_not_answer_or_a_changed_script_condemns_nothing(
    code: int, note: str
) -> None:
    story = fails_to_restore(restored((20, 3), (10, 2)), code, note)
    assert [type(d.action) for d in story.decides()] == [StartRanks]
    assert story.state.in_quarantine == frozenset()


def test_what_is_in_quarantine_at_the_start_is_neither_restored_nor_named_again() -> None:
    story = Story()
    story.launched()
    story.joins("n1", "n2", "n3")
    story.says(ev.CatalogueRead(commits=((10, 2),), quarantined=((20, 7),)))
    start = story.starts().action
    assert isinstance(start, StartRanks)
    assert start.restore is not None
    assert (start.restore.step, start.restore.attempt) == (10, 2)
    # Attempt 7 wrote objects: a new one of that number would find its keys taken.
    assert start.attempt == 8


def test_what_a_person_condemns_while_the_run_goes_on_is_not_restored() -> None:
    story = restored((20, 3), (10, 2)).steps(25)
    story.says(ev.QuarantineRead(places=((20, 3),)))
    story.fails()
    (start,) = [d.action for d in story.decides() if isinstance(d.action, StartRanks)]
    assert start.restore is not None
    assert start.restore.step == 10


def test_a_commit_of_that_step_by_a_later_attempt_counts() -> None:
    story = restored((20, 3), (10, 2)).steps(25)
    story.says(ev.QuarantineRead(places=((20, 3),)))
    story.uploads(20, attempt=4).commits(20, attempt=4)
    story.fails()
    (start,) = [d.action for d in story.decides() if isinstance(d.action, StartRanks)]
    assert start.restore is not None
    assert (start.restore.step, start.restore.attempt) == (20, 4)
