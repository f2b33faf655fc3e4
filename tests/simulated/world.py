"""A supervisor, its agents and a store without sockets, processes or clocks.

The supervisor does what `orchestrator.supervisor` does: journal, fold, decide, journal, carry
out. Everything that a network and a crash may do to it is a method here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.core import events as ev
from orchestrator.core.actions import (
    Commit,
    Decision,
    Finish,
    GiveBack,
    Launch,
    NoteNode,
    Prune,
    Quarantine,
    Restore,
    StartRanks,
    StopRanks,
    Unhold,
    Wait,
)
from orchestrator.core.buddies import buddies
from orchestrator.core.decide import decide
from orchestrator.core.events import DISK, PEER, Event
from orchestrator.core.fold import fold
from orchestrator.core.policy import Policy
from orchestrator.core.record import Origin, Record
from orchestrator.core.state import State
from orchestrator.supervisor.judge import verdict_on
from tests.simulated.agents import Agent, Order, Welcome
from tests.simulated.site import Site

MOST_DECISIONS = 30
Check = Callable[["World", Decision], None]


@dataclass
class World:
    """One run from its first record on. `check` looks at each decision before it counts.

    Attributes:
        site: The jobs of a run whose agents say where they belong; None: one allocation, unnamed.
        judges_at_once: As the supervisor does; else verdicts are left to the test.
        saved: By attempt and rank, the step that it saved when it was told to save and leave.
    """

    policy: Policy
    nodes: int = 2
    spares: int = 1
    ranks_per_node: int = 2
    checkpoints: bool = True
    check: Check | None = None
    now: float = 1_000_000.0
    epoch: int = 1
    state: State = field(default_factory=State)
    records: list[Record] = field(default_factory=list)
    queue: list[str] = field(default_factory=list)
    agents: dict[str, Agent] = field(default_factory=dict)
    late: list[tuple[Origin, Event]] = field(default_factory=list)
    parts: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    manifests: dict[int, int] = field(default_factory=dict)
    is_holding: bool = False
    site: Site | None = None
    judges_at_once: bool = False
    starts: dict[int, StartRanks] = field(default_factory=dict)
    saved: dict[int, dict[int, int]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    step: int = 0
    born: int = 0
    hellos: int = 0
    listing: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        self.is_holding = True
        self.hears(
            ev.RunRequested(
                run="r",
                nodes=self.nodes,
                spares=self.spares,
                ranks_per_node=self.ranks_per_node,
                interval_steps=4,
                checkpoints=self.checkpoints,
            )
        )
        self.hears(ev.LeaseTaken(epoch=1, holder="h"))
        self.hears(ev.PolicySet(policy=self.policy))
        self.is_holding = False
        self.settle()

    # The supervisor.

    def hears(self, event: Event, origin: Origin | None = None) -> None:
        """Journal and fold an event, and decide unless a batch is being collected."""
        record = Record(
            seq=self.state.seq + 1, at=self.now, epoch=self.epoch, event=event, origin=origin
        )
        self.records.append(record)
        self.state = fold(self.state, record)
        if not self.is_holding:
            self.settle()

    def settle(self) -> None:
        """Decide until nothing is left to decide."""
        self.is_holding = False
        for _ in range(MOST_DECISIONS):
            attempt = self.state.attempt
            if self.judges_at_once and attempt is not None and attempt.needs_verdict:
                self.is_holding = True
                self.judges_truly()
                self.is_holding = False
            found = decide(self.state, self.now, self.state.policy)
            if not found:
                return
            self._decided(found[0])
        raise AssertionError("the rules never come to rest")

    def _decided(self, decision: Decision) -> None:
        if self.check is not None:
            self.check(self, decision)
        self.is_holding = True
        self.hears(ev.DecisionMade(decision=decision))
        self.is_holding = False
        match decision.action:
            case StartRanks() as start:
                self.starts[start.attempt] = start
                self.step = start.restore.step if start.restore else 0
            case StopRanks() as stop:
                self.stopped.add(stop.attempt)
            case Wait():
                return
        self.queue.append(decision.key)

    def carries_out_next(self, answer: str = "ok") -> None:
        """Begin the oldest effect; one that was superseded meanwhile is left alone."""
        key = self.queue.pop(0)
        pending = self.state.pending.get(key)
        if pending is None:
            return
        match pending.action:
            case Launch() | GiveBack() | Unhold() | NoteNode() if self.site is not None:
                self._asks_the_site(self.site, key, answer)
            case Launch():
                self.answers(key, answer != "refused", "job-1")
            case NoteNode() | Quarantine() | Prune():
                self.answers(key, answer == "ok")
            case Finish():
                for agent in self.agents.values():
                    if agent.is_connected:
                        agent.kill_all()
                if self.site is not None:
                    self.site.is_left(self)
                self.answers(key)
            case Commit() as commit:
                self._commit(key, commit, answer)
            case _:
                for agent in self.agents.values():
                    self._tell(agent, key)

    def _asks_the_site(self, site: Site, key: str, answer: str) -> None:
        """A `silent` answer never comes, since the supervisor dies of it: the next asks again."""
        ok, detail = site.does(key, self.state.pending[key].action, answer == "refused")
        site.kills_agents(self)
        if answer == "silent":
            self.queue.append(key)
        else:
            self.answers(key, ok, detail)

    def _tell(self, agent: Agent, key: str) -> None:
        """Send an order to an agent that it concerns, never to one that its attempt has lost."""
        action, attempt = self.state.pending[key].action, self.state.attempt
        if attempt is None or agent.node in attempt.lost:
            return
        names = getattr(action, "nodes", attempt.nodes)
        current = self.state.is_current(agent.node, agent.incarnation)
        if current and agent.is_connected and agent.node in names:
            agent.inbox.append(Order(key, self.epoch, action))

    def answers(self, key: str, ok: bool = True, detail: str = "") -> None:
        self.hears(ev.ActionDone(key=key, ok=ok, detail=detail))

    def _commit(self, key: str, commit: Commit, answer: str) -> None:
        """The store's side of a commit: the manifest of a step is put only if absent."""
        which = (commit.step, commit.attempt)
        world = len(self.starts[commit.attempt].nodes) * self.ranks_per_node
        assert self.parts.get(which, set()) >= set(range(world)), "a shard is not in the store"
        if answer == "unreachable":
            return self.answers(key, ok=False)
        holder = self.manifests.get(commit.step)
        if answer == "refused" or (holder is not None and holder != commit.attempt):
            if holder == commit.attempt:
                return self.answers(key, ok=False)
            self.hears(ev.CommitRefused(step=commit.step, attempt=commit.attempt, why="torn"))
            return self.answers(key, ok=False)
        self.manifests[commit.step] = commit.attempt
        if answer == "lost":
            return self.answers(key, ok=False)
        if answer == "silent":
            return None
        self.hears(
            ev.CheckpointCommitted(
                step=commit.step, attempt=commit.attempt, manifest_key="m", nbytes=1
            )
        )
        return self.answers(key)

    def restarts(self, state: State, catalogue: bool) -> None:
        """Another supervisor takes over, with nothing but the journal's state."""
        self.state = state
        self.epoch += 1
        self.is_holding = True
        for agent in self.agents.values():
            agent.is_connected = False
        self.hears(ev.LeaseTaken(epoch=self.epoch, holder="h"))
        self.queue = list(self.state.pending)
        self.reads_catalogue(catalogue)

    def reads_catalogue(self, answer: bool) -> None:
        if not answer:
            return self.hears(ev.CatalogueUnknown(why="timeout"))
        commits, self.listing = self.listing, None
        if commits is None:
            commits = tuple(sorted(self.manifests.items(), reverse=True))
        return self.hears(ev.CatalogueRead(commits=commits))

    def lists(self) -> None:
        """A listing is under way: what is committed from now on is not in its answer."""
        self.listing = tuple(sorted(self.manifests.items(), reverse=True))

    def judges(self, fault: str, fault_class: str, node: str | None) -> None:
        attempt = self.state.attempt
        assert attempt is not None
        assert attempt.needs_verdict
        evidence = tuple(clue.seq for clue in attempt.clues[:2])
        self.hears(
            ev.FaultJudged(
                attempt=attempt.number,
                fault=fault,
                fault_class=fault_class,
                node=node,
                rank=None,
                confidence=0.5,
                cause=f"{fault} on {node}",
                evidence=evidence,
            )
        )

    def judges_truly(self) -> None:
        """The verdict that the supervisor would come to."""
        attempt = self.state.attempt
        assert attempt is not None
        self.hears(verdict_on(attempt, self.state.nodes))

    # Agents and what lies between.

    def boots(self, node: str, keeps_memory: bool = False) -> Agent:
        """A new agent process; one that ran there before is gone, with its ranks."""
        before = self.agents.get(node)
        self.born += 1
        staged = set(before.staged) if before and keeps_memory else set()
        if before is not None:
            self.late += before.outbox[:3]
        job = self.site.prepares(node) if self.site else ""
        copies = {c for c in before.copies if c.tier == DISK or keeps_memory} if before else set()
        self.agents[node] = Agent(node, f"i{self.born}", staged, job, copies=copies)
        return self.agents[node]

    def says_hello(self, agent: Agent) -> None:
        """An agent connects; orders in flight on its last connection are lost and sent again."""
        agent.inbox.clear()
        welcome = self._live_attempt_on(agent.node)
        agent.is_connected = True
        was_holding, self.is_holding = self.is_holding, True
        self.hears(
            ev.AgentJoined(
                node=agent.node,
                incarnation=agent.incarnation,
                address="",
                metrics_url="",
                attempt=agent.live_attempt,
                staged=agent.shards(),
                job=agent.job,
                replicas=agent.replicas(),
                replica_address=agent.replica_address if self.policy.peers else "",
            )
        )
        self.hellos += 1
        agent.inbox.append(Order(f"hello/{self.hellos}", self.epoch, Welcome(welcome)))
        if not self.state.is_current(agent.node, agent.incarnation):
            agent.is_connected = False  # told to come again
        if not was_holding:
            self.settle()
        for key in self.state.pending:
            if key not in self.queue:
                self._tell(agent, key)

    def _live_attempt_on(self, node: str) -> int:
        attempt = self.state.attempt
        if attempt is None or not attempt.is_live or node in attempt.lost:
            return 0
        return attempt.number if node in attempt.nodes else 0

    def delivers_fact(self, agent: Agent, acknowledged: bool = True) -> None:
        """The agent's oldest waiting message arrives; without its answer it comes again."""
        origin, event = agent.outbox[0]
        if acknowledged:
            agent.outbox.pop(0)
        self.hears(event, origin)

    def delivers_order(self, agent: Agent) -> None:
        order = agent.inbox.pop(0)
        before, failed = agent.attempt, list[int]()
        match order.action:
            case StartRanks(restore=Restore(fetches=fetches)) as start if (
                fetches and start.attempt > before and order.epoch >= agent.epoch
            ):
                failed = agent.fetches(start, self.agents)
        agent.obey(order)
        for rank in failed:
            agent.exits(rank, 77, "restore_failed")

    def copies(self, agent: Agent, tier: str) -> None:
        """What an agent's ranks staged last is copied to its buddy, or to its disk."""
        attempt = self.state.attempt
        if attempt is None or agent.node not in attempt.nodes:
            return
        buddy = buddies(attempt.nodes).get(agent.node, "") if tier == PEER else agent.node
        if buddy in self.agents:
            self.agents[buddy].keeps(agent.shards(), tier)

    def loses_agent(self, agent: Agent, silent_s: float) -> None:
        agent.is_connected = False
        self.hears(
            ev.AgentLost(
                node=agent.node, incarnation=agent.incarnation, why="silent", silent_s=silent_s
            )
        )

    # Training.

    def whole(self) -> tuple[Agent, ...]:
        """Agents of the live attempt when all its ranks run, else nothing."""
        attempt = self.state.attempt
        if attempt is None or not attempt.is_live:
            return ()
        agents = tuple(self.agents[name] for name in attempt.nodes if name in self.agents)
        ready = all(
            a.live_attempt == attempt.number and len(a.ranks) == self.ranks_per_node for a in agents
        )
        return agents if ready and len(agents) == len(attempt.nodes) else ()

    def trains(self, steps: int) -> None:
        agents = self.whole()
        self.step += steps
        number = agents[0].attempt
        self.hears(ev.PhaseReached(attempt=number, phase="first_step", step=self.step, age_s=0.0))
        self.hears(
            ev.Progress(
                attempt=number,
                min_step=self.step,
                max_step=self.step + 1,
                loss=2.0,
                step_s=0.5,
                stall_s=0.1,
                saves=self.step // 4,
                skipped_saves=0,
                tokens=self.step,
            )
        )

    def saves(self, steps: int) -> None:
        self.trains(steps)
        for agent in self.whole():
            agent.stage(self.step)

    def uploads(self, agent: Agent) -> None:
        """The agent's uploader, where there is a store, stores everything that is staged there."""
        for shard in agent.shards() if self.checkpoints else ():
            key = (shard.step, shard.attempt)
            self.parts.setdefault(key, set()).add(shard.rank)
            agent.fact(
                ev.ShardUploaded(
                    attempt=shard.attempt,
                    step=shard.step,
                    rank=shard.rank,
                    world=shard.world,
                    index_key=f"{key}/{shard.rank}",
                    index_crc64=7,
                    nbytes=1,
                    upload_s=1.0,
                )
            )

    def saves_and_leaves(self, agent: Agent) -> None:
        """The agent's ranks do what a planned stop asks of them, and its uploader goes on."""
        for rank in agent.ranks:
            self.saved.setdefault(agent.attempt, {})[rank] = self.step
        agent.stage(self.step)
        agent.is_saving = False
        self.uploads(agent)
        agent.kill_all(0)

    def calms(self) -> None:
        """Everything that waits happens, in order; no time passes and nothing new goes wrong."""
        self.settle()
        for _ in range(6):
            while self.queue:
                self.carries_out_next()
            if self.site is not None:
                self.site.is_noticed(self)
            for agent in self.agents.values():
                if not agent.is_connected:
                    self.says_hello(agent)
                while agent.inbox:
                    self.delivers_order(agent)
                if agent.is_saving:
                    self.saves_and_leaves(agent)
                if agent.is_stopping:
                    agent.kill_all()
                while agent.outbox:
                    self.delivers_fact(agent)
