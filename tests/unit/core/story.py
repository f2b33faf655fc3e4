"""A run told event by event: what the tests of the core are written in."""

from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.core import events as ev
from orchestrator.core.actions import Action, Decision, Launch, NoteNode, StartRanks
from orchestrator.core.decide import decide
from orchestrator.core.events import Event, Origin, Record, StagedShard
from orchestrator.core.fold import fold
from orchestrator.core.policy import Policy
from orchestrator.core.state import Attempt, Incident, State

POLICY = Policy(budget={"process": 5, "node": 5, "storage": 5}, tune_interval=False)


@dataclass
class Story:
    """Two nodes of two ranks and one spare unless said otherwise; the clock stands still."""

    nodes: int = 2
    spares: int = 1
    ranks_per_node: int = 2
    checkpoints: bool = True
    policy: Policy = POLICY
    now: float = 1000.0
    epoch: int = 1
    state: State = field(default_factory=State)
    records: list[Record] = field(default_factory=list)
    notes: list[NoteNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.says(
            ev.RunRequested(
                run="r",
                nodes=self.nodes,
                spares=self.spares,
                ranks_per_node=self.ranks_per_node,
                interval_steps=10,
                checkpoints=self.checkpoints,
            ),
            ev.LeaseTaken(epoch=1, holder="here"),
            ev.PolicySet(policy=self.policy),
        )

    def says(self, *events: Event, origin: Origin | None = None) -> "Story":
        for event in events:
            record = Record(
                seq=self.state.seq + 1, at=self.now, epoch=self.epoch, event=event, origin=origin
            )
            self.records.append(record)
            self.state = fold(self.state, record)
        return self

    def later(self, seconds: float) -> "Story":
        self.now += seconds
        return self

    def next(self) -> Decision | None:
        """What would be decided now; nothing is written."""
        found = decide(self.state, self.now, self.state.policy)
        assert len(found) <= 1
        return found[0] if found else None

    def decides(self) -> list[Decision]:
        """Decide and write until nothing is left; what goes to the ledger is kept apart."""
        made: list[Decision] = []
        for _ in range(20):
            decision = self.next()
            if decision is None:
                return made
            self.says(ev.DecisionMade(decision=decision))
            if isinstance(decision.action, NoteNode):
                self.notes.append(decision.action)
                self.done(decision)
            else:
                made.append(decision)
        raise AssertionError("the rules never come to rest")

    def decides_one(self) -> Decision:
        made = self.decides()
        assert len(made) == 1, [d.rule for d in made]
        return made[0]

    def done(self, decision: Decision, ok: bool = True, detail: str = "") -> "Story":
        return self.says(ev.ActionDone(key=decision.key, ok=ok, detail=detail))

    def launched(self) -> "Story":
        decision = self.decides_one()
        assert isinstance(decision.action, Launch)
        return self.done(decision, detail="job-1")

    def joins(self, *names: str, incarnation: str = "i1", **more: Any) -> "Story":
        for name in names:
            self.says(
                ev.AgentJoined(
                    node=name,
                    incarnation=incarnation,
                    address=f"10.0.0.{name[1:]}",
                    metrics_url="",
                    **more,
                )
            )
        return self

    def loses(self, name: str, silent_s: float = 0.0) -> "Story":
        incarnation = self.state.nodes[name].incarnation
        return self.says(
            ev.AgentLost(node=name, incarnation=incarnation, why="silent", silent_s=silent_s)
        )

    def starts(self) -> Decision:
        """Decide the next attempt and let all its agents confirm it."""
        decision = self.decides_one()
        assert isinstance(decision.action, StartRanks), decision
        self.confirms()
        return self.done(decision) and decision

    def confirms(self, *names: str) -> "Story":
        attempt = self.attempt
        for name in names or attempt.nodes:
            self.says(ev.RanksStarted(attempt=attempt.number, node=name, ranks=(), pids=()))
        return self

    def running(self, *commits: tuple[int, int], step: int = 0) -> "Story":
        """The first attempt runs and has reached `step`."""
        self.launched()
        self.joins(*(f"n{k + 1}" for k in range(self.nodes + self.spares)))
        if self.checkpoints:
            self.says(ev.CatalogueRead(commits=commits))
        self.starts()
        return self.steps(step) if step else self

    def steps(self, step: int, **measured: float) -> "Story":
        """All ranks have finished `step`."""
        values: dict[str, Any] = {"loss": 1.0, "step_s": 0.5, "stall_s": float("nan"), **measured}
        number = self.attempt.number
        self.says(ev.PhaseReached(attempt=number, phase="first_step", step=step, age_s=0.0))
        return self.says(
            ev.Progress(
                attempt=number,
                min_step=step,
                max_step=step,
                saves=values.pop("saves", 0),
                skipped_saves=0,
                tokens=step * 100,
                **values,
            )
        )

    def exits(self, *ranks: int, code: int = 0, ours: bool = False, note: str = "") -> "Story":
        attempt = self.attempt
        for rank in ranks:
            self.says(
                ev.RankExited(
                    attempt=attempt.number,
                    node=attempt.node_of(rank),
                    rank=rank,
                    code=code,
                    ours=ours,
                    note=note,
                )
            )
        return self

    def stops(self) -> "Story":
        """All ranks that have not exited yet are ended by us."""
        rest = [r for r in range(self.attempt.world) if r not in self.attempt.exits]
        return self.exits(*rest, code=-15, ours=True)

    def judged(
        self, fault: str = "rank_killed", fault_class: str = "process", **blame: Any
    ) -> "Story":
        values: dict[str, Any] = {"node": None, "rank": None, "cause": f"{fault}, it seems"}
        return self.says(
            ev.FaultJudged(
                attempt=self.attempt.number,
                fault=fault,
                fault_class=fault_class,
                confidence=0.9,
                evidence=(self.attempt.clues[0].seq,) if self.attempt.clues else (),
                **{**values, **blame},
            )
        )

    def fails(self, fault: str = "rank_killed", kind: str = "process", **blame: Any) -> "Story":
        """Rank 0 dies, all are stopped, and the end is judged; nothing is decided after that."""
        self.exits(0, code=-9)
        self.decides()
        return self.stops().judged(fault, kind, **blame)

    def stages(self, step: int, attempt: int = 1, nodes: tuple[str, ...] = ()) -> "Story":
        """A whole snapshot lies in the memory of the attempt's nodes."""
        per_node = self.ranks_per_node
        for position, name in enumerate(self.attempt.nodes):
            if nodes and name not in nodes:
                continue
            ranks = range(position * per_node, (position + 1) * per_node)
            shards = tuple(StagedShard(rank=r, step=step, attempt=attempt) for r in ranks)
            self.says(ev.Staged(node=name, shards=shards))
        return self

    def uploads(self, step: int, *ranks: int, attempt: int = 1, upload_s: float = 2.0) -> "Story":
        world = self.attempt.world
        for rank in ranks or range(world):
            self.says(
                ev.ShardUploaded(
                    attempt=attempt,
                    step=step,
                    rank=rank,
                    world=world,
                    index_key=f"k{rank}",
                    index_crc64=2**64 - 1,
                    nbytes=100,
                    upload_s=upload_s,
                )
            )
        return self

    def commits(self, step: int, attempt: int = 1) -> "Story":
        return self.says(
            ev.CheckpointCommitted(step=step, attempt=attempt, manifest_key="m", nbytes=400)
        )

    @property
    def attempt(self) -> Attempt:
        assert self.state.attempt is not None
        return self.state.attempt

    @property
    def incident(self) -> Incident:
        return self.state.incidents[-1]


def bare(action: Action) -> Action:
    """Return an action without the nodes that a request leaves out."""
    return replace(action, exclude=()) if isinstance(action, Launch) else action


def policy(**changes: Any) -> Policy:
    return replace(POLICY, **changes)
