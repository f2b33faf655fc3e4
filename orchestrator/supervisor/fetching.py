"""What nodes are told to bring to their memory before the ranks of an attempt start. Pure."""

from collections import defaultdict
from collections.abc import Mapping

from orchestrator.core.actions import StartRanks
from orchestrator.core.events import DISK
from orchestrator.core.node import Node
from orchestrator.wire import FetchedRank, FetchNode


def orders(start: StartRanks, nodes: Mapping[str, Node], timeout_s: float) -> dict[str, FetchNode]:
    """Return the orders by node; a node whose ranks have all that they need gets none.

    The decision names nodes; where these give their copies is looked up as late as now.
    """
    restore = start.restore
    ranks: dict[str, list[FetchedRank]] = defaultdict(list)
    for fetch in restore.fetches if restore is not None else ():
        own = start.nodes[fetch.rank // start.ranks_per_node]
        addresses = {name: node.replica_address for name, node in nodes.items()}
        sources = [
            *(addresses.get(name, "") for name in fetch.nodes),
            *(DISK if name == own else addresses.get(name, "") for name in fetch.disks),
        ]
        known = tuple(dict.fromkeys(source for source in sources if source))
        ranks[own].append(FetchedRank(rank=fetch.rank, sources=known))
    if restore is None:
        return {}
    return {
        node: FetchNode(
            attempt=start.attempt,
            step=restore.step,
            saved_by=restore.attempt,
            world=len(start.nodes) * start.ranks_per_node,
            ranks=tuple(own),
            timeout_s=timeout_s,
        )
        for node, own in ranks.items()
    }
