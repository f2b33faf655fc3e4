"""Which nodes an attempt gets: stable rank order, spares only where a node is missing."""

from orchestrator.core.node import Node
from orchestrator.core.state import State


def usable(state: State) -> tuple[str, ...]:
    """Names of nodes that may get ranks, those that are there to stay first, in natural order."""
    names = [node for node in state.nodes.values() if node.is_usable]
    return tuple(node.name for node in sorted(names, key=_rank))


def count_usable(state: State) -> int:
    """Return how many nodes may get ranks."""
    return sum(node.is_usable for node in state.nodes.values())


def count_good(state: State) -> int:
    """Return how many nodes may get ranks and are there to stay."""
    return sum(node.is_good for node in state.nodes.values())


def place(
    state: State, avoid: frozenset[str] = frozenset(), count: int = 0
) -> tuple[str, ...] | None:
    """Return the nodes in rank order, or None when too few are usable.

    A node of the last attempt keeps its place if it is usable and not in `avoid`; its place is
    otherwise taken by a usable node that had none, so that the other ranks find their memory. A
    node that the site wants back is taken only when there is no other.

    Args:
        state: What is known.
        avoid: Nodes that must not be used.
        count: How many are needed, 0 for as many as the run wants.
    """
    assert state.run is not None
    count = count or state.run.nodes
    if count_usable(state) < count:
        return None  # without sorting a thousand names at each of a thousand joins
    free = [name for name in usable(state) if name not in avoid]
    if len(free) < count:
        return None
    free = free[: max(count, sum(state.nodes[name].is_good for name in free))]
    if state.attempt is None:
        return tuple(free[:count])
    kept: list[str | None] = [n if n in free else None for n in state.attempt.nodes]
    spares = iter([name for name in free if name not in kept])
    if len(kept) > count:  # a smaller world: the places of missing nodes go first, then the last
        held = [name for name in kept if name is not None]
        kept = [*held[:count], *[None] * (count - len(held))]
    kept += [None] * (count - len(kept))
    return tuple(name if name is not None else next(spares) for name in kept)


def place_smaller(state: State, avoid: frozenset[str] = frozenset()) -> tuple[str, ...] | None:
    """Return a placement on fewer nodes than the run wants, None when it may not shrink so far."""
    assert state.run is not None
    least = state.policy.min_nodes or state.run.nodes
    count = sum(node.is_usable and node.name not in avoid for node in state.nodes.values())
    return place(state, avoid, count) if least <= count < state.run.nodes else None


def _rank(node: Node) -> tuple[bool, str, int]:
    """Order nodes that stay first, then node2 before node10."""
    name = node.name
    digits = len(name) - len(name.rstrip("0123456789"))
    head = name[: len(name) - digits]
    return not node.is_good, head, int(name[len(head) :] or 0)
