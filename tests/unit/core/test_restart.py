"""Where the next attempt runs and what it starts from."""

from orchestrator.core.actions import Restore, Source, StartRanks
from tests.unit.core.story import Story, policy


def start_of(story: Story) -> StartRanks:
    action = story.decides_one().action
    assert isinstance(action, StartRanks)
    return action


def test_a_dead_rank_is_restarted_on_the_same_nodes() -> None:
    story = Story().running(step=5).commits(4).fails(node="n1", rank=0)
    incident, verdict = story.incident, story.attempt.verdict_seq
    decision = story.decides_one()
    assert decision.rule == "restart_in_place"
    assert decision.action == StartRanks(
        attempt=2,
        nodes=("n1", "n2"),
        ranks_per_node=2,
        restore=Restore(step=4, attempt=1, source=Source.STORE),
        interval_steps=10,
    )
    assert decision.key == "r/1/start_ranks/2"
    assert decision.evidence == (*incident.evidence, verdict)


def test_nothing_is_restarted_before_the_verdict() -> None:
    story = Story().running(step=5).exits(0, code=1)
    story.decides()
    assert story.stops().decides() == []


def test_nothing_is_restarted_while_a_rank_may_live() -> None:
    story = Story().running(step=5).exits(0, code=1)
    story.decides()
    assert story.exits(1, 2, code=-15, ours=True).decides() == []


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    story = Story().running(step=5).loses("n1")
    story.decides()
    decision = story.stops().judged("node_lost", "node", node="n1").decides_one()
    assert decision.rule == "spare_takes_over"
    assert getattr(decision.action, "nodes", ()) == ("n3", "n2")
    assert "n3 takes the place of n1" in decision.reason


def test_a_lost_node_that_came_back_gets_its_ranks_again() -> None:
    story = Story().running(step=5).loses("n1")
    story.decides()
    story.stops().joins("n1", incarnation="i2").judged("node_lost", "node", node="n1")
    action = start_of(story)
    assert action.nodes == ("n1", "n2")
    assert action.exclude == ()


def test_a_node_with_evidence_against_it_is_excluded() -> None:
    story = Story().running(step=5).fails("gpu", "node", node="n2", rank=2)
    action = start_of(story)
    assert (action.nodes, action.exclude) == (("n1", "n3"), ("n2",))
    assert story.state.nodes["n2"].excluded


def test_a_node_blamed_again_and_again_is_excluded() -> None:
    story = Story(policy=policy(node_strikes=2)).running(step=5)
    story.fails(node="n2", rank=2)
    assert start_of(story).exclude == ()
    story.confirms().steps(6).fails(node="n2", rank=3)
    assert start_of(story).nodes == ("n1", "n3")


def test_without_a_spare_a_suspect_node_is_better_than_none() -> None:
    story = Story(spares=0).running(step=5).fails("gpu", "node", node="n2", rank=2)
    action = start_of(story)
    assert (action.nodes, action.exclude) == (("n1", "n2"), ())


def test_a_fault_without_a_culprit_excludes_nobody() -> None:
    story = Story().running(step=5).fails("gpu", "node")
    assert start_of(story).exclude == ()


def test_memory_is_used_where_it_is_whole_and_newer() -> None:
    story = Story().running((4, 1), step=9).stages(8).fails()
    assert start_of(story).restore == Restore(step=8, attempt=1, source=Source.MEMORY)


def test_a_spare_has_no_memory_so_the_store_counts() -> None:
    story = Story().running((4, 1), step=9).stages(8).loses("n1")
    story.decides()
    story.stops().judged("node_lost", "node", node="n1")
    assert start_of(story).restore == Restore(step=4, attempt=1, source=Source.STORE)


def test_bad_memory_leads_to_the_store() -> None:
    story = Story().running((4, 1), step=9).stages(8).fails()
    story.starts()
    story.fails("restore_failed", "storage")
    assert start_of(story).restore == Restore(step=4, attempt=1, source=Source.STORE)


def test_a_run_that_saved_nothing_starts_over() -> None:
    story = Story().running(step=9).fails()
    decision = story.decides_one()
    assert getattr(decision.action, "restore", "?") is None
    assert "from step 0 (nothing was saved yet)" in decision.reason


def test_attempts_are_counted_up() -> None:
    story = Story().running(step=1)
    for number in range(2, 6):
        story.fails()
        assert start_of(story).attempt == number
        story.confirms().steps(number)
