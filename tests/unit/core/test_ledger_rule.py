"""What a node did is noted for all runs, and how many may be excluded."""

import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import StartRanks
from tests.unit.core.story import Story, policy


def test_an_incident_is_noted_once_with_its_node_and_cause() -> None:
    story = Story().running(step=5).fails("hang", "process", node="n1", rank=0, cause="stuck")
    story.decides()
    (note,) = story.notes
    assert (note.node, note.incident, note.fault, note.cause) == ("n1", 1, "hang", "stuck")
    assert note.excluded_s == 0.0


def test_an_exclusion_is_noted_with_its_length() -> None:
    story = Story(policy=policy(exclude_s=3600.0)).running(step=5)
    story.fails("gpu", "node", node="n1", rank=0).decides()
    assert [n.excluded_s for n in story.notes] == [3600.0]
    assert story.state.nodes["n1"].excluded


@pytest.mark.parametrize(
    ("fault", "kind", "node"),
    [("rank_killed", "process", None), ("moved", "free", "n1"), ("user_error", "user", "n1")],
)
def test_what_is_blamed_on_no_node_is_not_noted(fault: str, kind: str, node: str | None) -> None:
    story = Story().running(step=5).fails(fault, kind, node=node)
    story.decides()
    assert story.notes == []


def test_the_incident_that_ends_the_run_is_noted_as_well() -> None:
    story = Story(policy=policy(budget={"node": 0})).running(step=5)
    story.fails("gpu", "node", node="n1", rank=0).decides()
    assert story.state.outcome
    assert [n.incident for n in story.notes] == [1]


def test_a_node_is_noted_without_exclusion_when_nothing_else_is_left() -> None:
    story = Story(spares=0).running(step=5).fails("gpu", "node", node="n1", rank=0)
    story.decides()
    assert [n.excluded_s for n in story.notes] == [0.0]


def test_no_further_node_is_excluded_once_many_were() -> None:
    story = Story(policy=policy(exclusion_limit=2)).running(step=5)
    story.says(ev.LedgerRead(excluded={"x": "run a", "y": "run b"}, excluded_lately=2))
    (start,) = story.fails("gpu", "node", node="n1", rank=0).decides()
    assert isinstance(start.action, StartRanks)
    assert start.action.exclude == ()
    assert start.action.nodes == ("n1", "n2")


def test_the_runs_own_exclusions_count_before_the_ledger_tells_them() -> None:
    story = Story(spares=3, policy=policy(exclusion_limit=1)).running(step=5)
    story.fails("gpu", "node", node="n1", rank=0)
    story.starts()
    story.steps(6).fails("gpu", "node", node="n2", rank=0)
    (start,) = story.decides()
    assert isinstance(start.action, StartRanks)
    assert start.action.exclude == ()


def test_the_last_exclusion_that_the_breaker_allows_is_carried_out() -> None:
    story = Story(policy=policy(exclusion_limit=1)).running(step=5)
    (start,) = story.fails("gpu", "node", node="n1", rank=0).decides()
    assert [n.excluded_s for n in story.notes] == [story.policy.exclude_s]
    assert isinstance(start.action, StartRanks)
    assert start.action.exclude == ("n1",)
    assert start.action.nodes == ("n3", "n2")
    assert story.state.excluded_lately == 1
