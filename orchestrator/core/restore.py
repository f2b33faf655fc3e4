"""Which checkpoint an attempt starts from: the newest that every rank can get, whole."""

from collections import defaultdict

from orchestrator.core.actions import Restore, Source
from orchestrator.core.state import State


def choose(state: State, nodes: tuple[str, ...]) -> Restore | None:
    """Return the newest restorable checkpoint for this placement; None: start from step 0.

    A committed checkpoint can be read by any placement. One that lies only in the nodes' memory
    counts if each rank's own node holds it complete and from one and the same attempt.
    """
    assert state.run is not None
    stored = [
        Restore(step=step, attempt=attempt, source=Source.STORE)
        for step, attempt in state.commits
        if (step, attempt, Source.STORE.value) not in state.quarantined
    ]
    candidates = [*in_memory(state, nodes), *stored]
    # At the same step the store wins: its manifest has been verified, and ranks still read their
    # own memory first where the sums agree.
    return max(
        candidates,
        key=lambda c: (c.step, c.source is Source.STORE, c.attempt),
        default=None,
    )


def in_memory(state: State, nodes: tuple[str, ...]) -> list[Restore]:
    """Return the checkpoints that lie whole in the memory of `nodes`, in no order."""
    assert state.run is not None
    world = len(nodes) * state.run.ranks_per_node
    return [
        Restore(step=step, attempt=attempt, source=Source.MEMORY)
        for (step, attempt), ranks in holders(state, nodes).items()
        if len(ranks) == world and (step, attempt, Source.MEMORY.value) not in state.quarantined
    ]


def holders(state: State, nodes: tuple[str, ...]) -> dict[tuple[int, int], set[int]]:
    """Return by (step, attempt) which ranks have that snapshot in their own node's memory.

    A snapshot of a world of another size is none of a rank of this one.
    """
    assert state.run is not None
    per_node = state.run.ranks_per_node
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for position, name in enumerate(nodes):
        own = range(position * per_node, (position + 1) * per_node)
        for shard in state.nodes[name].staged:
            if shard.rank in own and shard.world in (0, len(nodes) * per_node):
                found[shard.step, shard.attempt].add(shard.rank)
    return found


def has_history(state: State) -> bool:
    """Whether anything was ever committed: then step 0 is never chosen by itself."""
    return bool(state.commits)
