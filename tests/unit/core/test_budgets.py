"""How many incidents a run may have."""

from orchestrator.core.budgets import same_root_streak, spent, strikes
from tests.unit.core.story import Story, policy


def test_a_run_without_incidents_has_spent_nothing() -> None:
    story = Story().running()
    assert spent(story.state, "process", story.now) == ()
    assert same_root_streak(story.state) == 0
    assert strikes(story.state, "n1", story.now) == ()


def test_only_the_class_the_window_and_the_unforgiven_count() -> None:
    story = Story(policy=policy(budget_window_s=100.0)).running(step=5)
    story.fails()
    story.starts()
    story.commits(6, attempt=2)
    story.later(50).fails("gpu", "node", node="n1")
    story.starts()
    story.later(40).fails("hang")
    assert [i.fault for i in spent(story.state, "process", story.now)] == ["hang"]
    assert [i.fault for i in spent(story.state, "node", story.now)] == ["gpu"]
    assert spent(story.state, "node", story.now + 70) == ()


def test_numbers_in_the_cause_do_not_make_it_another_root() -> None:
    story = Story().running(step=5)
    story.fails("rank_crashed", cause="Assertion failed at 0x7f01")
    story.starts()
    story.fails("rank_crashed", cause="Assertion failed at 0x55aa")
    assert same_root_streak(story.state) == 2


def test_another_cause_or_a_new_step_ends_the_streak() -> None:
    story = Story().running(step=5)
    story.fails("rank_crashed", cause="ValueError: a")
    story.starts()
    story.fails("rank_crashed", cause="KeyError: b")
    assert same_root_streak(story.state) == 1
    story.starts()
    story.steps(6).fails("rank_crashed", cause="KeyError: b")
    assert same_root_streak(story.state) == 1


def test_two_lost_nodes_are_two_roots() -> None:
    story = Story(spares=3).running(step=5)
    story.fails("node_lost", "node", node="n1")
    story.starts()
    story.fails("node_lost", "node", node="n2")
    assert same_root_streak(story.state) == 1


def test_strikes_count_what_is_blamed_on_the_node() -> None:
    story = Story().running(step=5).fails(node="n1", rank=0)
    story.starts()
    story.fails(node="n2", rank=2)
    assert len(strikes(story.state, "n1", story.now)) == 1
    assert strikes(story.state, "n3", story.now) == ()
