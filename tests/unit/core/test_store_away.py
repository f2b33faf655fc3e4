from orchestrator.core import events as ev
from orchestrator.core.actions import Finish, Restore, Source, StartRanks, Wait
from tests.unit.core.story import Story

NEWEST = Restore(step=20, attempt=3, source=Source.STORE)


def is_away(story: Story) -> Story:
    """A rank of the attempt waited in vain for the store."""
    story.exits(1, code=80, note="store_away")
    story.decides()
    return story.stops().judged("store_away", "storage", node="n1", cause="rank 1: no such bucket")


def read_again(story: Story) -> Story:
    return story.says(ev.CatalogueRead(commits=((20, 3), (10, 2))))


def test_a_store_that_was_away_condemns_nothing_and_is_waited_for() -> None:
    story = is_away(Story().running((20, 3), (10, 2)))
    waits = story.decides_one()
    assert isinstance(waits.action, Wait)
    assert waits.reason == "waiting for the store: rank 1: no such bucket"
    assert story.later(10_000).decides() == []
    read_again(story)
    start = story.decides_one().action
    assert isinstance(start, StartRanks)
    assert start.restore == NEWEST
    assert story.state.quarantined == frozenset()
    assert story.incident.node is None


def test_it_is_asked_the_later_the_more_often_it_was_away() -> None:
    story = read_again(is_away(Story().running((20, 3))))
    for pause_s in (2, 4):
        assert isinstance(story.decides_one().action, Wait)
        story.later(pause_s - 0.1)
        assert story.decides() == []
        story.later(0.2)
        story.starts()
        read_again(is_away(story))
    end = story.decides_one()
    assert isinstance(end.action, Finish)
    assert end.rule == "no_progress"


def test_what_the_nodes_hold_does_not_wait_for_the_store() -> None:
    story = is_away(Story().running((20, 3)))
    for name, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
        shards = tuple(ev.StagedShard(rank=r, step=24, attempt=1) for r in ranks)
        story.says(ev.Staged(node=name, shards=shards))
    start = story.decides_one().action
    assert isinstance(start, StartRanks)
    assert start.restore is not None
    assert start.restore.source is Source.MEMORY


def test_what_is_being_deleted_is_not_found_again() -> None:
    commits = ((40, 3), (30, 3), (20, 3), (10, 2))
    story = Story().running(*commits).steps(45)
    story.says(ev.RetentionPlanned(places=((10, 2),)))
    story.decides_one()
    story.says(ev.CatalogueRead(commits=commits))
    assert story.state.commits == commits[:3]
