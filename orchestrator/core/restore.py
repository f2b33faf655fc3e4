"""Which checkpoint an attempt starts from: the newest that every rank can get, whole."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.core.actions import Fetch, Restore, Source
from orchestrator.core.events import DISK, PEER
from orchestrator.core.state import State

Key = tuple[int, int]
MOST_SOURCES = 4

# At the same step the store wins over the nodes' own memory: its manifest has been verified, and
# ranks still read their own memory first where the sums agree. Where some rank has nothing in its
# own memory it loses against the copies: they are nearer, and there without the store.
_NEARNESS = (Source.MEMORY, Source.STORE, Source.DISK, Source.PEER)


def choose(state: State, nodes: tuple[str, ...]) -> Restore | None:
    """Return the newest restorable checkpoint for this placement; None: start from step 0.

    A committed checkpoint can be read by any placement. One that lies only on the nodes counts if
    each rank can get its part, from one and the same attempt: from its own node's memory, from
    another node's, or from a node's disk.
    """
    assert state.run is not None
    stored = [
        Restore(step=step, attempt=attempt, source=Source.STORE)
        for step, attempt in state.commits
        if (step, attempt, Source.STORE.value) not in state.quarantined
    ]
    return max(
        [*on_nodes(state, nodes), *stored],
        key=lambda c: (c.step, _NEARNESS.index(c.source), c.attempt),
        default=None,
    )


def on_nodes(state: State, nodes: tuple[str, ...]) -> list[Restore]:
    """Return the checkpoints that every rank can get without the store, in no order.

    The source of one is the furthest place that some rank needs. What failed to restore from there
    is left out together with all that lies in places of this kind.
    """
    assert state.run is not None
    found = [_gather(state, nodes, key, at) for key, at in _places(state, nodes).items()]
    return [restore for restore in found if restore is not None]


def holders(state: State, nodes: Sequence[str]) -> dict[Key, set[int]]:
    """Return by (step, attempt) which ranks have that snapshot in their own node's memory.

    A snapshot of a world of another size is none of a rank of this one.
    """
    return {key: set(p.own) for key, p in _places(state, nodes).items() if p.own}


def unsent(state: State, nodes: Sequence[str]) -> dict[Key, set[int]]:
    """As `holders`, of those snapshots that the uploader sends."""
    return {key: set(p.to_send) for key, p in _places(state, nodes).items() if p.to_send}


def has_history(state: State) -> bool:
    """Whether anything was ever committed, or whole on disks: never step 0 by itself then."""
    return bool(state.commits or state.committed_before) or state.on_disks is not None


@dataclass(slots=True)
class _Places:
    """Where the parts of one checkpoint lie."""

    world: int
    own: set[int] = field(default_factory=set)
    to_send: set[int] = field(default_factory=set)
    copies: dict[tuple[str, int], list[str]] = field(default_factory=lambda: defaultdict(list))

    def of(self, tier: str, rank: int, own: str) -> tuple[str, ...]:
        """Return the nodes that keep a copy of a rank's part, its own node first."""
        names = sorted(self.copies.get((tier, rank), ()), key=lambda name: name != own)
        return tuple(names[:MOST_SOURCES])


def _places(state: State, nodes: Sequence[str]) -> Mapping[Key, _Places]:
    assert state.run is not None
    per_node = state.run.ranks_per_node
    world = len(nodes) * per_node
    found: dict[Key, _Places] = defaultdict(lambda: _Places(world=world))
    for position, name in enumerate(nodes):
        own = range(position * per_node, (position + 1) * per_node)
        node = state.nodes[name]
        for shard in node.staged:
            if shard.rank in own and shard.world in (0, world):
                places = found[shard.step, shard.attempt]
                places.own.add(shard.rank)
                if shard.for_store:
                    places.to_send.add(shard.rank)
    for node in state.nodes.values():
        for copy in node.replicas if node.alive and node.replica_address else ():
            if copy.world == world:
                found[copy.step, copy.attempt].copies[copy.tier, copy.rank].append(node.name)
    return found


def _gather(state: State, nodes: Sequence[str], key: Key, places: _Places) -> Restore | None:
    """Let each rank take its part from the nearest place; None when one has it nowhere."""
    step, attempt = key
    bad = {source for *of, source in state.quarantined if tuple(of) == key}
    per_node = places.world // len(nodes)
    furthest = Source.MEMORY
    fetches = []
    for rank in range(places.world):
        if rank in places.own and Source.MEMORY not in bad:
            continue
        own = nodes[rank // per_node]
        names = () if Source.PEER in bad else places.of(PEER, rank, own)
        disks = () if Source.DISK in bad else places.of(DISK, rank, own)
        if not names and not disks:
            return None
        fetches.append(Fetch(rank=rank, nodes=names, disks=disks))
        if furthest is not Source.DISK:
            furthest = Source.PEER if names else Source.DISK
    if furthest in bad or (fetches and attempt > state.last_attempt):
        return None  # it failed, or it is of an attempt that nobody has heard of
    return Restore(step=step, attempt=attempt, source=furthest, fetches=tuple(fetches))
