"""An agent and its ranks as the supervisor sees them: facts out, orders in, once per key."""

from dataclasses import dataclass, field

from orchestrator.core import events as ev
from orchestrator.core.actions import Action, StartRanks, StopRanks
from orchestrator.core.events import DISK, PEER, Event, Replica, StagedShard
from orchestrator.core.record import Origin

KEPT_SLOTS = 2


@dataclass(frozen=True)
class Welcome:
    """The answer to a hello: ranks of any attempt but this one must end."""

    attempt: int


@dataclass(frozen=True)
class Order:
    """What a supervisor of an epoch told one incarnation of an agent."""

    key: str
    epoch: int
    action: Action | Welcome


@dataclass
class Agent:
    """One agent process. Its messages wait in `outbox` until they are acknowledged.

    Attributes:
        job: The allocation that its node belongs to, "" where nobody says.
        attempt: The newest that it started or was told to stop.
        world: Number of ranks of the attempt that it started last.
        is_saving: Its ranks were told to save and leave, and have not done it yet.
        copies: What it keeps of snapshots, for others in memory and of its own on a disk.
    """

    node: str
    incarnation: str
    staged: set[StagedShard] = field(default_factory=set)
    job: str = ""
    epoch: int = 0
    attempt: int = 0
    world: int = 0
    ranks: set[int] = field(default_factory=set)
    is_stopping: bool = False
    is_saving: bool = False
    is_connected: bool = False
    done: set[str] = field(default_factory=set)
    inbox: list[Order] = field(default_factory=list)
    outbox: list[tuple[Origin, Event]] = field(default_factory=list)
    sent: int = 0
    copies: set[Replica] = field(default_factory=set)

    @property
    def live_attempt(self) -> int:
        return self.attempt if self.ranks else 0

    def fact(self, event: Event) -> None:
        self.sent += 1
        origin = Origin(node=self.node, incarnation=self.incarnation, n=self.sent)
        self.outbox.append((origin, event))

    def shards(self) -> tuple[StagedShard, ...]:
        return tuple(sorted(self.staged, key=lambda s: (s.rank, s.step, s.attempt)))

    @property
    def replica_address(self) -> str:
        return f"{self.node}/{self.incarnation}"

    def replicas(self) -> tuple[Replica, ...]:
        return tuple(sorted(self.copies, key=lambda c: (c.tier, c.rank, c.step, c.attempt)))

    def keeps(self, shards: tuple[StagedShard, ...], tier: str) -> None:
        """Keep copies; of each rank the newest slots."""
        for s in shards:
            mine = [c for c in self.copies if (c.tier, c.rank) == (tier, s.rank)]
            mine.sort(key=lambda c: (c.attempt, c.step))
            self.copies -= set(mine[: max(0, len(mine) + 1 - KEPT_SLOTS)])
            copy = Replica(tier=tier, rank=s.rank, step=s.step, attempt=s.attempt, world=s.world)
            self.copies.add(copy)
        told = ev.Replicated(node=self.node, address=self.replica_address, replicas=self.replicas())
        self.fact(told)

    def fetches(self, start: StartRanks, others: dict[str, "Agent"]) -> list[int]:
        """Bring what the ranks lack; return those for which nobody really had it."""
        assert start.restore is not None
        step, attempt = start.restore.step, start.restore.attempt
        world = len(start.nodes) * start.ranks_per_node
        failed = []
        for fetch in start.restore.fetches:
            if start.nodes[fetch.rank // start.ranks_per_node] != self.node:
                continue
            wanted = {
                tier: Replica(tier=tier, rank=fetch.rank, step=step, attempt=attempt, world=world)
                for tier in (PEER, DISK)
            }
            places = [*((n, PEER) for n in fetch.nodes), *((n, DISK) for n in fetch.disks)]
            if not any(n in others and wanted[tier] in others[n].copies for n, tier in places):
                failed.append(fetch.rank)
                continue
            shard = StagedShard(rank=fetch.rank, step=step, attempt=attempt, world=world)
            self.staged = {s for s in self.staged if s.rank != fetch.rank} | {shard}
        self.fact(ev.Staged(node=self.node, shards=self.shards()))
        return failed

    def obey(self, order: Order) -> None:
        """Carry out an order unless it is old or done."""
        if order.epoch < self.epoch or order.key in self.done:
            return
        self.epoch = order.epoch
        self.done.add(order.key)
        match order.action:
            case Welcome(attempt=attempt) if attempt != self.attempt:
                self.kill_all()
            case StartRanks() as start if start.attempt > self.attempt:
                self._start(start)
            case StopRanks() as stop if stop.attempt >= self.attempt:
                self.attempt = stop.attempt
                self.is_saving = stop.planned and not self.is_stopping and bool(self.ranks)
                self.is_stopping = True
                self._tell_when_gone()
            case _:
                pass

    def _start(self, start: StartRanks) -> None:
        assert not self.ranks, "ranks of an older attempt still run"
        self.attempt, self.is_stopping, self.is_saving = start.attempt, False, False
        self.world = len(start.nodes) * start.ranks_per_node
        first = start.nodes.index(self.node) * start.ranks_per_node
        self.ranks = set(range(first, first + start.ranks_per_node))
        ranks = tuple(sorted(self.ranks))
        self.fact(ev.RanksStarted(attempt=start.attempt, node=self.node, ranks=ranks, pids=ranks))

    def exits(self, rank: int, code: int, note: str = "") -> None:
        """A rank ends, by itself or because it was told to."""
        self.ranks.discard(rank)
        self.fact(
            ev.RankExited(
                attempt=self.attempt,
                node=self.node,
                rank=rank,
                code=code,
                ours=self.is_stopping,
                note=note,
            )
        )
        self._tell_when_gone()

    def kill_all(self, code: int = -9) -> None:
        self.is_stopping, self.is_saving = bool(self.ranks), False
        for rank in sorted(self.ranks):
            self.exits(rank, code)

    def _tell_when_gone(self) -> None:
        if self.is_stopping and not self.ranks:
            self.is_stopping = False
            self.fact(ev.RanksGone(attempt=self.attempt, node=self.node))

    def stage(self, step: int) -> None:
        """Every rank saves; each keeps its newest slots."""
        for rank in self.ranks:
            own = sorted((s for s in self.staged if s.rank == rank), key=lambda s: s.step)
            self.staged -= set(own[: max(0, len(own) + 1 - KEPT_SLOTS)])
            shard = StagedShard(rank=rank, step=step, attempt=self.attempt, world=self.world)
            self.staged.add(shard)
        self.fact(ev.Staged(node=self.node, shards=self.shards()))
