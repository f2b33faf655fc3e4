"""A run told through the core: facts are given, every decision is made by `decide`."""

from dataclasses import replace
from functools import cache

from monitors.faults import CLASS_OF, FaultKind
from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core.decide import decide
from orchestrator.core.events import Event
from orchestrator.core.fold import fold
from orchestrator.core.policy import Policy
from orchestrator.core.record import Record
from orchestrator.core.saves import SaveCost
from orchestrator.core.state import State

START = 1_800_000_000.0
NAN = float("nan")
COST = SaveCost(
    ranks=4,
    stall_s=0.03,
    stage_s=0.02,
    staged_nbytes=40_000_000,
    sent_nbytes=14_000_000,
    sent_s=0.2,
    upload_s=0.21,
    age_s=2.0,
    retries={"SlowDown": 2},
    hedges=1,
    planes=("boto3",),
)


class Story:
    """Builds the journal of a run of two nodes with two ranks each and one spare."""

    def __init__(self, *, interval: int = 20, policy: Policy | None = None) -> None:
        self.at = START
        self.state = State()
        self.records: list[Record] = []
        self.epoch = 1
        self.saves = 0
        policy = policy or Policy(budget={"process": 5, "node": 3, "storage": 2})
        self.add(
            ev.RunRequested(
                run="moe-demo",
                nodes=2,
                spares=1,
                ranks_per_node=2,
                interval_steps=interval,
                checkpoints=True,
            )
        )
        self.add(ev.PolicySet(policy=policy))
        self.add(ev.LeaseTaken(epoch=1, holder="login1:4711"))

    def add(self, event: Event, after: float = 0.0) -> Record:
        self.at += after
        record = Record(seq=len(self.records) + 1, at=self.at, epoch=self.epoch, event=event)
        self.records.append(record)
        self.state = fold(self.state, record)
        return record

    def decide(self) -> list[act.Decision]:
        made = []
        while decisions := decide(self.state, self.at, self.state.policy):
            for decision in decisions:
                made.append(decision)
                self.add(ev.DecisionMade(decision=decision))
        return made

    def done(self, decision: act.Decision, detail: str = "", ok: bool = True) -> None:
        self.add(ev.ActionDone(key=decision.key, ok=ok, detail=detail), after=0.05)

    def launch(self) -> "Story":
        self.add(ev.CatalogueRead(commits=()), after=0.3)
        (decision,) = self.decide()[:1]
        self.done(decision, detail="4242")
        for k in (1, 2, 3):
            self.add(
                ev.AgentJoined(
                    node=f"node-{k}",
                    incarnation=f"i{k}",
                    address=f"10.0.0.{k}:1",
                    metrics_url=f"http://10.0.0.{k}:9400/metrics",
                ),
                after=0.6,
            )
            self.decide()
        return self.up()

    def up(self, import_s: float = 2.4) -> "Story":
        """Bring the ordered attempt to its first step."""
        attempt = self.state.attempt
        assert attempt is not None
        self.saves = 0
        for k, node in enumerate(attempt.nodes):
            self.add(
                ev.RanksStarted(
                    attempt=attempt.number,
                    node=node,
                    ranks=(2 * k, 2 * k + 1),
                    pids=(100 + k, 200 + k),
                ),
                after=0.1,
            )
        for key in [
            k for k, p in self.state.pending.items() if isinstance(p.action, act.StartRanks)
        ]:
            self.add(ev.ActionDone(key=key, ok=True))
        base = attempt.restore.step if attempt.restore else 0
        self._phase("restore", base, import_s)
        self._phase("step", base, 0.5)
        self._phase("first_step", base + 1, 0.7)
        return self

    def _phase(self, phase: str, step: int, after: float) -> None:
        assert self.state.attempt is not None
        number = self.state.attempt.number
        self.add(ev.PhaseReached(attempt=number, phase=phase, step=step, age_s=0.0), after=after)

    def train(self, until: int, step_s: float = 0.12, saves: bool = True) -> "Story":
        """Step until `until`, saving and committing at the interval."""
        attempt = self.state.attempt
        assert attempt is not None
        for step in range(attempt.min_step + 1, until + 1):
            saved = saves and step % self.state.interval_steps == 0
            self.saves += saved
            self.add(
                ev.Progress(
                    attempt=attempt.number,
                    min_step=step,
                    max_step=step,
                    loss=5.5 * (1 + step) ** -0.12,
                    step_s=step_s,
                    stall_s=0.03 if self.saves else NAN,
                    saves=self.saves,
                    skipped_saves=0,
                    tokens=step * 8192,
                ),
                after=step_s,
            )
            if saved:
                self.stage(step)
                self.commit(step)
            for decision in self.decide():
                self.done(decision)
        return self

    def stage(self, step: int) -> None:
        attempt = self.state.attempt
        assert attempt is not None
        for k, node in enumerate(attempt.nodes):
            shards = tuple(
                ev.StagedShard(rank=2 * k + i, step=step, attempt=attempt.number) for i in (0, 1)
            )
            self.add(ev.Staged(node=node, shards=shards))

    def commit(self, step: int) -> None:
        attempt = self.state.attempt
        assert attempt is not None
        for rank in range(4):
            self.add(
                ev.ShardUploaded(
                    attempt=attempt.number,
                    step=step,
                    rank=rank,
                    world=4,
                    index_key=f"data/step-{step:012d}/rank-{rank:05d}.json",
                    index_crc64=rank,
                    nbytes=3_500_000,
                    upload_s=0.21,
                ),
                after=0.01,
            )
        (decision,) = self.decide()[:1]
        self.add(
            ev.CheckpointCommitted(
                step=step,
                attempt=attempt.number,
                manifest_key="m",
                nbytes=14_000_000,
                cost=COST,
            ),
            after=0.02,
        )
        self.done(decision)

    def kill_rank(self, rank: int = 3) -> "Story":
        attempt = self.state.attempt
        assert attempt is not None
        exited = self.add(
            ev.RankExited(
                attempt=attempt.number,
                node=attempt.node_of(rank),
                rank=rank,
                code=-9,
                ours=False,
                age_s=0.15,
            ),
            after=0.2,
        )
        (stop,) = self.decide()
        self._rest_exits(attempt.nodes)
        self.done(stop)
        self.judge(
            FaultKind.RANK_KILLED,
            f"rank {rank} on {attempt.node_of(rank)} was killed by SIGKILL",
            (exited.seq,),
            node=attempt.node_of(rank),
            rank=rank,
        )
        return self

    def lose_node(self, node: str = "node-2") -> "Story":
        lost = self.add(
            ev.AgentLost(
                node=node,
                incarnation=self.state.nodes[node].incarnation,
                why="its connection broke and did not come back",
                silent_s=1.5,
            ),
            after=1.7,
        )
        (stop,) = self.decide()
        assert self.state.attempt is not None
        self._rest_exits(tuple(n for n in self.state.attempt.nodes if n != node))
        self.done(stop)
        cause = f"{node} is gone: its connection broke and did not come back"
        self.judge(FaultKind.NODE_LOST, cause, (lost.seq,), node=node)
        return self

    def _rest_exits(self, nodes: tuple[str, ...]) -> None:
        attempt = self.state.attempt
        assert attempt is not None
        for rank in range(attempt.world):
            if attempt.node_of(rank) in nodes and rank not in attempt.exits:
                self.add(
                    ev.RankExited(
                        attempt=attempt.number,
                        node=attempt.node_of(rank),
                        rank=rank,
                        code=-15,
                        ours=True,
                    ),
                    after=0.12,
                )

    def judge(
        self,
        fault: FaultKind,
        cause: str,
        evidence: tuple[int, ...],
        node: str | None = None,
        rank: int | None = None,
    ) -> None:
        assert self.state.attempt is not None
        self.add(
            ev.FaultJudged(
                attempt=self.state.attempt.number,
                fault=fault.value,
                fault_class=CLASS_OF[fault].value,
                node=node,
                rank=rank,
                confidence=0.9,
                cause=cause,
                evidence=evidence,
            ),
            after=0.02,
        )
        self.decide()

    def replace_supervisor(self, away_s: float = 2.0) -> "Story":
        self.epoch += 1
        self.add(ev.LeaseTaken(epoch=self.epoch, holder=f"login1:{4711 + self.epoch}"), away_s)
        self.decide()
        return self

    def finish(self) -> "Story":
        attempt = self.state.attempt
        assert attempt is not None
        step = attempt.min_step
        if self.state.commits[0][0] != step:
            self.stage(step)
            self.commit(step)
        for rank in range(4):
            self.add(
                ev.RankExited(
                    attempt=attempt.number,
                    node=attempt.node_of(rank),
                    rank=rank,
                    code=0,
                    ours=False,
                ),
                after=0.05,
            )
        (decision,) = self.decide()
        self.done(decision)
        return self


@cache
def whole_story() -> Story:
    """The demo's run: a rank killed, a node lost, the supervisor replaced, the end. Read only."""
    story = Story().launch().train(75).kill_rank().up(0.9).train(150)
    story.lose_node().up(1.1).train(200)
    story.replace_supervisor().train(300)
    return story.finish()


def restamp(record: Record, reason: str) -> Record:
    """Return a decision's record with another reason, as a changed program would make it."""
    assert isinstance(record.event, ev.DecisionMade)
    decision = replace(record.event.decision, reason=reason)
    return replace(record, event=ev.DecisionMade(decision=decision))
