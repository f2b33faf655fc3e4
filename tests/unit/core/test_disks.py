"""Runs whose only copies are on the disks of nodes that come late, or never."""

from dataclasses import replace

import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import Finish, Launch, Source, StartRanks, Wait
from orchestrator.core.codec import decode_record, encode
from orchestrator.core.events import DISK, Replica
from tests.unit.core.story import Story, policy

OWN = {"n1": (0, 1), "n2": (2, 3)}


def copies(node: str, step: int = 30, attempt: int = 1) -> tuple[Replica, ...]:
    return tuple(
        Replica(tier=DISK, rank=rank, step=step, attempt=attempt, world=4) for rank in OWN[node]
    )


def comes(story: Story, node: str, *held: Replica, incarnation: str = "i2") -> Story:
    return story.joins(
        node, incarnation=incarnation, replicas=held, replica_address=f"{node}:{incarnation}"
    )


def copied(*nodes: str, **limits: object) -> Story:
    """A run without a store at step 50; the nodes have copies of step 30 on their disks."""
    story = Story(checkpoints=False, policy=policy(**limits)).running(step=50)
    for node in nodes:
        told = ev.Replicated(node=node, address=f"{node}:1", replicas=copies(node))
        story.says(told)
    return story


def lost(story: Story, *nodes: str) -> Story:
    for node in nodes:
        story.loses(node)
    story.decides()
    return story.stops().judged("node_lost", "node", node=nodes[0])


def test_a_spare_does_not_begin_anew_while_the_copies_are_on_a_lost_disk() -> None:
    story = lost(copied("n1", "n2"), "n2")
    (waits,) = story.decides()
    assert isinstance(waits.action, Wait)
    assert waits.reason == (
        "waiting for step 30, which is on the disks of nodes that are not here: n2"
    )
    assert story.state.waiting_for == waits.reason
    assert story.later(100).decides() == []
    comes(story, "n2", *copies("n2"))
    start = story.decides_one().action
    assert isinstance(start, StartRanks)
    assert start.restore is not None
    assert (start.restore.step, start.restore.source) == (30, Source.DISK)


@pytest.mark.parametrize("comes_back", ["never", "without its disk"])
def test_when_they_do_not_come_the_run_ends_and_says_what_it_lacks(comes_back: str) -> None:
    story = lost(copied("n1", "n2"), "n1", "n2")
    comes(story, "n1", *copies("n1"))
    if comes_back == "without its disk":
        comes(story, "n2")
    assert isinstance(story.decides_one().action, Wait)
    story.later(story.policy.launch_timeout_s + 1)
    end = story.decides_one()
    assert isinstance(end.action, Finish)
    assert end.rule == "history_unusable"
    assert end.reason.startswith("nobody brought step 30, which is on the disks of nodes that are")
    assert end.reason.endswith("not starting over from step 0")


def test_a_shorter_world_does_not_begin_anew_either() -> None:
    story = lost(copied("n1", "n2", min_nodes=1), "n2", "n3")
    assert isinstance(story.decides_one().action, Wait)


def test_the_missing_nodes_are_asked_for_meanwhile() -> None:
    story = lost(copied("n1", "n2", replace_nodes=True), "n2")
    story.later(60)
    launch = story.decides()[0].action
    assert isinstance(launch, Launch)
    assert launch.nodes == 1


def test_what_a_disk_could_not_give_ends_the_run_at_once() -> None:
    story = copied("n1", "n2")
    story.fails()
    story.starts()
    story.exits(0, code=77, note="restore_failed")
    story.decides()
    story.stops().judged("restore_failed", "storage", node="n1")
    end = story.decides_one()
    assert isinstance(end.action, Finish)
    assert end.reason == (
        "step 30 could not be restored from the nodes' disks; not starting over from step 0"
    )


def test_parts_of_a_checkpoint_are_no_history() -> None:
    story = lost(copied("n2"), "n2")
    start = story.decides_one().action
    assert isinstance(start, StartRanks)
    assert start.restore is None


def test_what_was_in_memory_alone_is_given_up_and_that_is_said() -> None:
    story = Story(checkpoints=False).running(step=50).steps(51, saves=2).stages(50)
    start = lost(story, "n2").decides_one()
    assert isinstance(start.action, StartRanks)
    assert start.action.restore is None
    assert start.reason.endswith("from step 0 (what was saved was in memory that is gone)")


def test_an_agent_that_has_not_looked_yet_says_nothing_of_its_disk() -> None:
    story = copied("n1", "n2")
    story.joins("n2", incarnation="i2")
    assert story.state.nodes["n2"].shelf == copies("n2")
    comes(story, "n2", incarnation="i3")
    assert story.state.nodes["n2"].shelf == ()
    assert story.state.on_disks == (30, 1)


def test_a_later_journal_waits_for_what_the_earlier_one_knew() -> None:
    before = Story(checkpoints=False).records[0]
    assert isinstance(before.event, ev.RunRequested)
    event = replace(before.event, attempts_before=2, on_disks_before=(30, 1))
    assert decode_record(encode(replace(before, event=event))).event == event
    story = Story(checkpoints=False)
    story.says(event).launched()
    comes(story, "n1", *copies("n1"), incarnation="i1").joins("n3")
    waits = story.decides_one()
    assert isinstance(waits.action, Wait)
    assert "step 30" in waits.reason
    comes(story, "n2", *copies("n2"), incarnation="i1")
    start = story.decides_one().action
    assert isinstance(start, StartRanks)
    assert start.restore is not None
    assert start.restore.step == 30


def test_it_does_not_begin_anew_once_it_waited_long_enough() -> None:
    story = Story(checkpoints=False)
    requested = story.records[0].event
    assert isinstance(requested, ev.RunRequested)
    story.says(replace(requested, on_disks_before=(30, 1))).launched().joins("n1", "n3")
    story.decides_one()
    end = story.later(story.policy.launch_timeout_s + 1).decides_one()
    assert isinstance(end.action, Finish)
    assert end.rule == "history_unusable"


def test_a_run_all_of_whose_checkpoints_are_in_quarantine_does_not_begin_anew() -> None:
    story = Story().launched().joins("n1", "n2")
    story.says(ev.CatalogueRead(commits=((20, 1),), quarantined=((20, 1),)))
    end = story.decides_one()
    assert isinstance(end.action, Finish)
    assert "none of the 1 committed" in end.reason
