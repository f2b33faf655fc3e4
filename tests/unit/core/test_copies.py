"""Who keeps whose snapshots, and what an attempt can start from besides memory and store."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.actions import Fetch, Pair, Restore, Source, StartRanks
from orchestrator.core.buddies import buddies
from orchestrator.core.codec import decode_record, encode
from orchestrator.core.events import DISK, PEER, Replica
from orchestrator.core.restore import choose
from orchestrator.core.rules.pair import RETRY_S
from orchestrator.supervisor.judge import verdict_on
from tests.unit.core.story import Story, policy

NODES = ("n1", "n2")
PEERS = policy(peers=True)


class Kept(Story):
    """A run whose nodes keep copies."""

    def keeps(
        self, node: str, *ranks: int, step: int = 30, tier: str = PEER, **more: Any
    ) -> "Kept":
        found = self.state.nodes[node].replicas
        fields = {"attempt": 1, "world": self.attempt.world, **more}
        new = tuple(Replica(tier=tier, rank=r, step=step, **fields) for r in ranks)
        self.says(ev.Replicated(node=node, address=f"{node}:7", replicas=(*found, *new)))
        return self

    def restore(self, nodes: tuple[str, ...] = NODES) -> Restore | None:
        return choose(self.state, nodes)


def running(step: int = 50) -> Kept:
    story = Kept(policy=PEERS)
    story.running(step=step)
    return story


@given(st.integers(1, 40))
def test_each_node_keeps_what_one_other_stages(count: int) -> None:
    nodes = [f"n{k}" for k in range(count)]
    found = buddies(nodes)
    if count == 1:
        assert found == {}
        return
    assert list(found) == nodes
    assert sorted(found.values()) == sorted(nodes)
    assert all(node != buddy for node, buddy in found.items())
    if count > 3:
        neighbours = {(i, (i + 1) % count) for i in range(count)}
        assert not any((nodes.index(a), nodes.index(b)) in neighbours for a, b in found.items())


def test_a_replaced_node_gets_its_buddys_copy() -> None:
    story = running()
    story.stages(30).commits(20)
    story.keeps("n1", 2, 3).loses("n2")
    expected = Restore(
        step=30,
        attempt=1,
        source=Source.PEER,
        fetches=(Fetch(rank=2, nodes=("n1",)), Fetch(rank=3, nodes=("n1",))),
    )
    assert story.restore(("n1", "n3")) == expected


def test_it_does_so_without_the_store_when_that_has_the_same_step() -> None:
    story = running()
    story.stages(30).commits(30)
    story.keeps("n1", 2, 3)
    assert story.restore() == Restore(step=30, attempt=1, source=Source.STORE)
    story.loses("n2")
    restore = story.restore(("n1", "n3"))
    assert restore is not None
    assert restore.source is Source.PEER


def test_a_step_counts_only_if_every_rank_can_get_it() -> None:
    story = running()
    story.stages(30).commits(20)
    story.keeps("n1", 2).loses("n2")
    assert story.restore(("n1", "n3")) == Restore(step=20, attempt=1, source=Source.STORE)


def test_a_copy_of_another_world_or_of_an_unknown_attempt_is_none() -> None:
    for wrong in ({"world": 6}, {"attempt": 7}):
        story = running()
        story.commits(20)
        story.keeps("n1", 0, 1, 2, 3, **wrong)
        assert story.restore() == Restore(step=20, attempt=1, source=Source.STORE)


def test_after_all_memory_is_lost_the_disks_serve() -> None:
    story = running()
    story.stages(30).commits(20)
    for name in ("n1", "n2"):
        story.loses(name)
    own = {"n1": (0, 1), "n2": (2, 3)}
    for name, ranks in own.items():
        copies = tuple(Replica(tier=DISK, rank=r, step=30, attempt=1, world=4) for r in ranks)
        story.joins(name, incarnation="i2", replicas=copies, replica_address=f"{name}:7")
    restore = story.restore()
    fetches = tuple(Fetch(rank=r, disks=("n1" if r < 2 else "n2",)) for r in range(4))
    expected = Restore(step=30, attempt=1, source=Source.DISK, fetches=fetches)
    assert restore == expected
    assert story.restore(("n2", "n1")) == expected, "in another order too"


def test_what_could_not_be_fetched_is_tried_from_the_next_place_once() -> None:
    story = running()
    story.commits(20)
    for name, ranks in (("n1", (2, 3)), ("n2", (0, 1))):
        story.keeps(name, *ranks)
        story.keeps(name, *(r ^ 2 for r in ranks), tier=DISK)
    story.fails()
    tried = []
    for _ in range(3):
        start = story.decides()[-1].action
        assert isinstance(start, StartRanks)
        assert start.restore is not None
        tried.append((start.restore.source, start.restore.step))
        story.exits(2, code=77, note="restore_failed")
        story.decides()
        story.stops().judged("restore_failed", "storage", node="n2")
        assert story.incident.node == ("n2" if start.restore.source is Source.STORE else None)
    assert not story.state.nodes["n2"].excluded
    assert tried == [(Source.PEER, 30), (Source.DISK, 30), (Source.STORE, 20)]


@pytest.mark.parametrize("first", ["the copy breaks off", "the node is silent"])
@pytest.mark.parametrize("next_best", [Source.DISK, Source.STORE])
def test_a_buddy_that_dies_in_a_fetch_is_followed_by_the_next_best(
    first: str, next_best: Source
) -> None:
    story = running()
    story.stages(30).commits(20)
    story.keeps("n1", 2, 3)
    if next_best is Source.DISK:
        story.keeps("n3", 0, 1, 2, 3, tier=DISK)
    story.loses("n2").decides()
    judge(story.stops())
    start = story.decides()[-1].action
    assert isinstance(start, StartRanks)
    assert start.restore is not None
    assert (start.nodes, start.restore.source) == (("n1", "n3"), Source.PEER)
    story.joins("n4", incarnation="i1")
    if first == "the node is silent":
        story.loses("n1", silent_s=10.0)
    story.exits(2, 3, code=77, note="restore_failed").decides()
    if first == "the copy breaks off":
        story.loses("n1")
    judge(story.stops())
    again = story.decides()[-1].action
    assert isinstance(again, StartRanks)
    assert again.restore is not None
    assert (again.nodes, again.restore.source) == (("n4", "n3"), next_best)
    assert again.restore.step == (30 if next_best is Source.DISK else 20)
    assert not story.state.nodes["n3"].excluded


def judge(story: Story) -> None:
    """The verdict that the supervisor would come to."""
    story.says(verdict_on(story.attempt, story.state.nodes))


def test_bad_memory_is_read_from_the_copies_instead() -> None:
    story = running()
    story.stages(30)
    story.keeps("n1", 2, 3).keeps("n2", 0, 1)
    first = story.restore()
    assert first is not None
    assert first.source is Source.MEMORY
    story.fails()
    story.decides()
    story.fails("restore_failed", "storage")
    again = story.restore()
    assert again is not None
    assert (again.source, len(again.fetches)) == (Source.PEER, 4)


def test_a_fetch_has_its_time_before_the_start_counts_as_slow() -> None:
    story = running()
    story.stages(30)
    story.keeps("n1", 2, 3).loses("n2")
    story.decides()
    story.exits(0, 1, code=-15, ours=True).judged("node_lost", "node", node="n2")
    start = story.decides()[-1].action
    assert isinstance(start, StartRanks)
    assert story.later(PEERS.start_timeout_s + PEERS.fetch_timeout_s - 1).next() is None
    decision = story.later(2).next()
    assert decision is not None
    assert decision.rule == "slow_start"


def test_nodes_are_told_once_where_their_copies_go_and_again_when_that_moves() -> None:
    story = running()
    assert story.decides() == [], "nobody has said yet where it takes them"
    story.keeps("n1").keeps("n2")
    told = story.decides_one()
    assert told.action == Pair(attempt=1, buddies={"n1": "n2:7", "n2": "n1:7"})
    story.done(told)
    assert story.decides() == []
    story.says(ev.Replicated(node="n2", address="n2:8", replicas=()))
    told = story.decides_one()
    assert told.action == Pair(attempt=1, buddies={"n1": "n2:8"})
    story.done(told).joins("n1", incarnation="i1", attempt=1, replica_address="n1:7")
    told = story.decides_one()
    assert told.action == Pair(attempt=1, buddies={"n1": "n2:8"})
    story.done(told).says(ev.Replicated(node="n2", address="", replicas=()))
    assert story.decides() == [], "it starts again, and says so soon"


def test_who_could_not_be_told_is_told_again_after_a_while() -> None:
    story = running()
    story.keeps("n1").keeps("n2")
    first = story.decides_one()
    story.done(first, ok=False)
    assert story.decides() == []
    story.later(RETRY_S)
    assert story.decides_one().action == first.action


def test_a_journal_of_before_there_were_copies_reads() -> None:
    story = running()
    story.stages(30).commits(30)
    story.fails()
    story.decides()
    added = {"replicas", "replica_address", "for_store", "fetches", "peers", "fetch_timeout_s"}

    def without(value: Any) -> Any:
        if isinstance(value, list):
            return [without(item) for item in value]
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if k not in added}
        return value

    old = [decode_record(without(encode(record))) for record in story.records]
    kinds = (ev.AgentJoined, ev.Staged, ev.DecisionMade)
    assert [r for r in old if isinstance(r.event, kinds)] == [
        r for r in story.records if isinstance(r.event, kinds)
    ]


def test_without_the_tier_nobody_is_told_anything() -> None:
    story = Kept()
    story.running(step=5)
    story.keeps("n1").keeps("n2")
    assert story.decides() == []


def test_a_snapshot_that_is_not_for_the_store_is_not_waited_for() -> None:
    story = running()
    for name, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
        shards = tuple(ev.StagedShard(rank=r, step=48, attempt=1, for_store=False) for r in ranks)
        story.says(ev.Staged(node=name, shards=shards))
    story.says(ev.OperatorSaid(what="stop"))
    story.decides()
    story.exits(0, 1, 2, 3)
    assert [d.rule for d in story.decides()] == ["operator.stop"]
    assert story.state.outcome is not None
