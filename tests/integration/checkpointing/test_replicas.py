"""Two nodes' processes on one machine: copies over loopback, killed at each stage, brought back."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpointing.stage.arena import peek
from checkpointing.tiers import Tier
from tests.integration.checkpointing.replicating import TOKEN, ReplicaNode, Spoiler

NBYTES = 64 << 20
SMALL = 8 << 20
BOTH = Tier.PEER | Tier.DISK
STAGES = ("begun", "half", "whole")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., ReplicaNode]]:
    made: list[ReplicaNode] = []

    def make(name: str, *options: str, rank: int = 0) -> ReplicaNode:
        made.append(ReplicaNode(tmp_path / name, *options, rank=rank, world=2))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def held_slots(node: ReplicaNode) -> list[int]:
    return [staged.step for staged in peek(node.arena) if staged.held]


def test_a_replaced_node_restores_what_its_buddy_and_a_disk_keep(
    node: Callable[..., ReplicaNode],
) -> None:
    sender, buddy = node("sender"), node("buddy", rank=1)
    sender.say(do="buddy", address=buddy.address)
    sender.stage(1, NBYTES, BOTH)
    buddy.until(lambda: buddy.held("peer") == [1])
    sender.until(lambda: sender.held("disk") == [1])
    sender.until(lambda: len(sender.of("copied")) == 2)
    sender.until(lambda: not held_slots(sender))
    assert {event["tier"] for event in sender.of("copied")} == {"peer", "disk"}
    sender.kill()
    new = node("new")
    fetched = new.fetch(sender.name(1), "127.0.0.1:1", buddy.address)
    assert fetched["ok"], fetched
    assert fetched["from"] == buddy.address
    assert new.restores(1, NBYTES)
    new.arena.unlink()
    fetched = new.fetch(sender.name(1), "disk", buddy.address)
    assert (fetched["ok"], fetched["from"]) == (True, "disk")
    assert new.restores(1, NBYTES)
    assert not new.fetch(sender.name(9), "disk", buddy.address)["ok"]
    buddy.say(do="clear")
    buddy.until(lambda: buddy.held("peer") == [])
    assert [one.stop() for one in (new, buddy)] == [0, 0]


@pytest.mark.parametrize("victim", ["sender", "buddy"])
def test_whoever_is_killed_when_the_next_process_finishes_the_copy(
    node: Callable[..., ReplicaNode], victim: str
) -> None:
    """At 16 MB/s for both tiers together a copy takes about a second."""
    sender = node("sender", "--max-bytes-per-s", "16e6")
    buddy = node("buddy", rank=1)
    address = buddy.address
    for step, stage in enumerate(STAGES, start=1):
        sender.say(do="buddy", address=address)
        sender.stage(step, SMALL, BOTH)
        reach(buddy, step, stage)
        killed = sender if victim == "sender" else buddy
        killed.kill()
        if stage != "whole":
            assert step not in buddy.held("peer")
        killed.start()
        assert buddy.address == address  # the same port: its buddies need not be told
        if victim == "sender":
            sender.say(do="buddy", address=address)
        buddy.until(lambda step=step: step in buddy.held("peer"), stage)
        sender.until(lambda step=step: step in sender.held("disk"), stage)
        sender.until(lambda: not held_slots(sender))
        assert buddy.coming() == []
    assert buddy.held("peer") == sender.held("disk") == [3, 2]
    new = node("new")
    assert new.fetch(sender.name(3), address)["ok"]
    assert new.restores(3, SMALL)


def reach(buddy: ReplicaNode, step: int, stage: str) -> None:
    """Wait until a copy is so far."""
    if stage == "whole":
        buddy.until(lambda: step in buddy.held("peer"))
        return
    least = SMALL // 2 if stage == "half" else 0
    folder = buddy.folder / "replicas"
    buddy.until(lambda: any(size(path) >= least for path in folder.glob(".coming-*")))


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def test_what_is_altered_or_cut_on_the_way_is_refused_and_sent_again(
    node: Callable[..., ReplicaNode],
) -> None:
    sender, buddy = node("sender"), node("buddy", rank=1)
    with Spoiler(buddy.address, SMALL // 2) as spoiler:
        sender.say(do="buddy", address=spoiler.address)
        sender.stage(1, SMALL, Tier.PEER)
        sender.until(lambda: sender.of("copied"))
    told = [event.get("error", "") for event in sender.of("copy_failed")]
    assert len(told) == 2
    assert "fail their CRC" in told[0]
    assert buddy.coming() == []
    new = node("new")
    assert new.fetch(sender.name(1), buddy.address)["ok"]
    assert new.restores(1, SMALL)


def test_a_killed_fetch_leaves_the_arena_whole_or_absent(node: Callable[..., ReplicaNode]) -> None:
    sender, buddy, new = node("sender"), node("buddy", rank=1), node("new")
    sender.say(do="buddy", address=buddy.address)
    sender.stage(1, NBYTES, Tier.PEER)
    buddy.until(lambda: buddy.held("peer") == [1])
    order = {"id": 1, **sender.name(1).to_json(), "arena": str(new.arena)}
    new.say(do="fetch", **order, **{"from": [buddy.address]})
    new.until(lambda: [*new.folder.glob(".fetching-*"), *new.folder.glob("arena-0")])
    new.kill()
    assert not new.arena.exists() or new.restores(1, NBYTES)
    new.start()
    assert new.address
    assert not list(new.folder.glob(".fetching-*"))
    assert new.fetch(sender.name(1), buddy.address)["ok"]
    assert new.restores(1, NBYTES)


def test_a_dead_process_holds_no_slot_for_long_and_the_next_takes_over(
    node: Callable[..., ReplicaNode],
) -> None:
    sender, buddy = node("sender", "--max-bytes-per-s", "16e6"), node("buddy", rank=1)
    sender.say(do="buddy", address=buddy.address)
    sender.stage(1, SMALL, Tier.PEER)
    sender.until(lambda: held_slots(sender))
    sender.kill()
    assert held_slots(sender) == [1]
    sender.stage(2, SMALL, Tier.PEER)
    sender.stage(3, SMALL, Tier.PEER)  # not into the slot that seems to be copied still
    assert [staged.step for staged in peek(sender.arena)] == [3, 1]
    sender.start()
    sender.say(do="buddy", address=buddy.address)
    buddy.until(lambda: buddy.held("peer") == [3, 1])
    sender.until(lambda: not held_slots(sender))


def test_signals_for_the_agent_end_nothing_and_wrong_starts_are_told(
    node: Callable[..., ReplicaNode],
) -> None:
    one = node("n")
    assert one.address
    os.kill(one.process.pid, signal.SIGTERM)
    one.say(do="dance")
    one.until(lambda: one.of("refused"))
    assert TOKEN not in Path(f"/proc/{one.process.pid}/cmdline").read_text()
    assert TOKEN not in Path(f"/proc/{one.process.pid}/environ").read_text()
    assert one.stop() == 0
    one.start(token="short")
    assert one.process.wait(20) == 2
