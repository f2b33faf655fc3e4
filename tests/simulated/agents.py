"""An agent and its ranks as the supervisor sees them: facts out, orders in, once per key."""

from dataclasses import dataclass, field

from orchestrator.core import events as ev
from orchestrator.core.actions import Action, StartRanks, StopRanks
from orchestrator.core.events import Event, StagedShard
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

    @property
    def live_attempt(self) -> int:
        return self.attempt if self.ranks else 0

    def fact(self, event: Event) -> None:
        self.sent += 1
        origin = Origin(node=self.node, incarnation=self.incarnation, n=self.sent)
        self.outbox.append((origin, event))

    def shards(self) -> tuple[StagedShard, ...]:
        return tuple(sorted(self.staged, key=lambda s: (s.rank, s.step, s.attempt)))

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
