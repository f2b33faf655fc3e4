"""Who keeps whose snapshots in memory: each node of a placement has a buddy among the others."""

from collections.abc import Sequence

from orchestrator.core.state import State


def buddies(nodes: Sequence[str]) -> dict[str, str]:
    """Return the buddy of each node, given in rank order; a single node has none.

    A ring with a stride of half the nodes: each keeps what one other stages, and nodes that stand
    beside each other, so perhaps at one switch or one power supply, rarely keep each other's.
    """
    stride = len(nodes) // 2
    if not stride:
        return {}
    return {name: nodes[(i + stride) % len(nodes)] for i, name in enumerate(nodes)}


def addresses(state: State, nodes: Sequence[str]) -> dict[str, str]:
    """Return for each node where its buddy takes copies, "" while that is not known."""
    found = {}
    for name, buddy in buddies(nodes).items():
        node = state.nodes.get(buddy)
        found[name] = node.replica_address if node is not None and node.alive else ""
    return found
