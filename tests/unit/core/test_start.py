"""The first attempt."""

from dataclasses import replace

import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import Finish, Restore, Source, StartRanks, Wait
from tests.unit.core.story import Story, policy


def test_the_first_attempt_waits_for_the_list_of_checkpoints() -> None:
    story = Story().launched().joins("n1", "n2")
    decision = story.decides_one()
    assert isinstance(decision.action, Wait)
    assert "not answered yet" in decision.reason
    story.says(ev.CatalogueUnknown(why="403 Forbidden"))
    assert "403 Forbidden" in story.decides_one().reason
    assert isinstance(story.says(ev.CatalogueRead(commits=())).decides_one().action, StartRanks)


def test_a_run_without_a_store_waits_for_no_list() -> None:
    story = Story(checkpoints=False).launched().joins("n1", "n2")
    assert isinstance(story.decides_one().action, StartRanks)


def test_the_first_attempt_goes_on_from_an_older_runs_checkpoint() -> None:
    story = Story().launched().joins("n1", "n2").says(ev.CatalogueRead(commits=((40, 3), (20, 2))))
    decision = story.decides_one()
    assert isinstance(decision.action, StartRanks)
    assert decision.action.restore == Restore(step=40, attempt=3, source=Source.STORE)
    joined = [r.seq for r in story.records if isinstance(r.event, ev.AgentJoined)]
    assert decision.evidence == tuple(joined)


def test_nodes_get_ranks_in_the_natural_order_of_their_names() -> None:
    story = Story(nodes=3, checkpoints=False).launched().joins("n10", "n9", "n2")
    action = story.decides_one().action
    assert isinstance(action, StartRanks)
    assert action.nodes == ("n2", "n9", "n10")


def test_a_run_that_may_have_fewer_nodes_starts_with_them_once_the_others_are_late() -> None:
    story = Story(nodes=3, policy=policy(min_nodes=2), checkpoints=False).launched()
    assert story.joins("n1", "n2").decides_one().reason == "waiting for nodes: 2 of 3 are usable"
    assert story.later(119).decides() == []
    decision = story.later(2).decides_one()
    assert isinstance(decision.action, StartRanks)
    assert decision.action.nodes == ("n1", "n2")
    assert decision.reason.startswith("2 of 3 nodes are ready")


@pytest.mark.parametrize("checkpoints", [True, False])
def test_another_store_than_before_is_no_reason_to_start_over(checkpoints: bool) -> None:
    story = Story(checkpoints=checkpoints)
    requested = story.records[0].event
    assert isinstance(requested, ev.RunRequested)
    story.says(replace(requested, attempts_before=2, committed_before=40)).launched()
    decision = story.joins("n1", "n2").says(ev.CatalogueRead(commits=())).decides_one()
    assert isinstance(decision.action, Finish)
    assert decision.rule == "history_unusable"
    assert decision.reason.startswith("step 40 was committed, and this run file's store lacks it")
