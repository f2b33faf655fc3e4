"""Which nodes an attempt gets: stable rank order, spares only where a node is missing."""

from orchestrator.core.state import State


def usable(state: State) -> tuple[str, ...]:
    """Names of nodes that may get ranks, in the natural order of their names."""
    names = [node.name for node in state.nodes.values() if node.alive and not node.excluded]
    return tuple(sorted(names, key=_natural))


def count_usable(state: State) -> int:
    """Return how many nodes may get ranks."""
    return sum(node.alive and not node.excluded for node in state.nodes.values())


def place(state: State, avoid: frozenset[str] = frozenset()) -> tuple[str, ...] | None:
    """Return the nodes in rank order, or None when too few are usable.

    A node of the last attempt keeps its ranks if it is usable and not in `avoid`; its place is
    otherwise taken by a usable node that had none, so that the other ranks find their memory.
    """
    assert state.run is not None
    if count_usable(state) < state.run.nodes:
        return None  # without sorting a thousand names at each of a thousand joins
    free = [name for name in usable(state) if name not in avoid]
    if len(free) < state.run.nodes:
        return None
    if state.attempt is None:
        return tuple(free[: state.run.nodes])
    kept = [name if name in free else None for name in state.attempt.nodes]
    spares = iter([name for name in free if name not in kept])
    return tuple(name if name is not None else next(spares) for name in kept)


def _natural(name: str) -> tuple[str, int]:
    """Order node2 before node10."""
    digits = len(name) - len(name.rstrip("0123456789"))
    head = name[: len(name) - digits]
    return head, int(name[len(head) :] or 0)
