"""Which checkpoint an attempt starts from."""

from orchestrator.core import events as ev
from orchestrator.core.actions import Restore, Source
from orchestrator.core.events import StagedShard
from orchestrator.core.restore import choose, has_history, on_nodes
from tests.unit.core.story import Story

NODES = ("n1", "n2")


def memory(step: int, attempt: int = 1) -> Restore:
    return Restore(step=step, attempt=attempt, source=Source.MEMORY)


def store(step: int, attempt: int = 1) -> Restore:
    return Restore(step=step, attempt=attempt, source=Source.STORE)


def test_nothing_saved_is_step_0() -> None:
    story = Story().running(step=5)
    assert choose(story.state, NODES) is None
    assert not has_history(story.state)


def test_the_newest_commit_is_taken() -> None:
    story = Story().running(step=50).commits(20).commits(40).commits(30)
    assert choose(story.state, NODES) == store(40)
    assert has_history(story.state)


def test_newer_memory_beats_the_store_and_older_does_not() -> None:
    story = Story().running(step=50).commits(20).stages(30)
    assert choose(story.state, NODES) == memory(30)
    assert choose(story.commits(40).state, NODES) == store(40)


def test_at_the_same_step_the_store_is_taken() -> None:
    story = Story().running(step=50).stages(30).commits(30)
    assert choose(story.state, NODES) == store(30)


def test_memory_counts_only_when_every_rank_has_it() -> None:
    story = Story().running(step=50).stages(30, nodes=("n1",))
    assert on_nodes(story.state, NODES) == []


def test_shards_of_different_attempts_make_no_checkpoint() -> None:
    story = Story().running(step=50).stages(30, nodes=("n1",)).stages(30, 2, nodes=("n2",))
    assert on_nodes(story.state, NODES) == []


def test_memory_counts_only_on_the_node_of_its_rank() -> None:
    story = Story().running(step=50).stages(30)
    assert on_nodes(story.state, ("n2", "n1")) == []
    assert on_nodes(story.state, ("n1", "n3")) == []


def test_of_two_whole_slots_the_newer_is_taken() -> None:
    story = Story().running(step=50)
    for name, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
        shards = tuple(
            StagedShard(rank=r, step=step, attempt=1)
            for r in ranks
            for step in ((20, 30, 40) if name == "n1" else (20, 30))
        )
        story.says(ev.Staged(node=name, shards=shards))
    assert sorted(c.step for c in on_nodes(story.state, NODES)) == [20, 30]
    assert choose(story.state, NODES) == memory(30)


def test_what_failed_to_restore_is_not_taken_again_from_there() -> None:
    story = Story().running(step=50).commits(20).commits(40).stages(40).fails()
    assert story.decides_one().action.restore == store(40)  # type: ignore[union-attr]
    story.fails("restore_failed", "storage")
    assert choose(story.state, NODES) == memory(40)
    story.decides()
    story.fails("restore_failed", "storage")
    assert choose(story.state, NODES) == store(20)


def test_another_fault_quarantines_nothing() -> None:
    story = Story().running(step=50).commits(40).fails()
    story.starts()
    story.fails("rank_crashed")
    assert story.state.quarantined == frozenset()
