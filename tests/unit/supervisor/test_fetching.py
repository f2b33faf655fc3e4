"""What nodes are told to bring before the ranks of an attempt start."""

from orchestrator.core.actions import Fetch, Restore, Source, StartRanks
from orchestrator.core.node import Node
from orchestrator.supervisor.fetching import orders
from orchestrator.wire import FetchedRank, FetchNode


def node(name: str, address: str = "") -> Node:
    return Node(
        name=name,
        incarnation="i",
        alive=True,
        address="",
        metrics_url="",
        joined_seq=1,
        replica_address=address,
    )


def start(*fetches: Fetch) -> StartRanks:
    restore = Restore(step=30, attempt=1, source=Source.PEER, fetches=fetches)
    return StartRanks(
        attempt=2, nodes=("n1", "n3"), ranks_per_node=2, restore=restore, interval_steps=4
    )


NODES = {"n1": node("n1", "n1:7"), "n2": node("n2"), "n3": node("n3", "n3:7")}


def test_each_node_is_told_of_its_own_ranks_by_the_addresses_of_now() -> None:
    found = orders(start(Fetch(rank=2, nodes=("n1", "n2")), Fetch(rank=3, nodes=("n2",))), NODES, 9)
    ranks = (FetchedRank(rank=2, sources=("n1:7",)), FetchedRank(rank=3, sources=()))
    assert found == {
        "n3": FetchNode(attempt=2, step=30, saved_by=1, world=4, ranks=ranks, timeout_s=9)
    }


def test_the_own_disk_comes_behind_memory_and_needs_no_address() -> None:
    fetch = Fetch(rank=0, nodes=("n3",), disks=("n1", "n3", "gone"))
    (order,) = orders(start(fetch), NODES, 9).values()
    assert order.ranks == (FetchedRank(rank=0, sources=("n3:7", "disk")),)


def test_nothing_is_brought_where_nothing_lacks() -> None:
    assert orders(start(), NODES, 9) == {}
