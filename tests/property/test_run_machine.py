"""Whatever happens, in whatever order: what the core promises about every run.

A hypothesis state machine drives `fold` and `decide` in a simulated world: agents come, go and
come back, ranks end in any way, messages are lost, repeated and reordered between agents, answers
never come or come twice, the supervisor dies between any two records.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from monitors.faults import CLASS_OF, FaultKind
from orchestrator.core import events as ev
from orchestrator.core.actions import Pair, StartRanks, StopRanks
from orchestrator.core.policy import Policy
from orchestrator.core.state import AttemptPhase
from orchestrator.supervisor.journal import state_of
from tests.property.promises import check_decision, live_attempts, replay
from tests.simulated.agents import Agent
from tests.simulated.world import World

POLICY = Policy(budget={"process": 4, "node": 4, "storage": 3}, final_upload_s=100.0, peers=True)
NODES = ("n1", "n2", "n3", "n4")
ANSWERS = ("ok", "ok", "ok", "refused", "unreachable", "lost", "silent")
CODES = (0, 0, 1, 77, 78, 127, -6, -9, -11, -15)
picks = st.integers(min_value=0, max_value=7)
mostly = st.sampled_from((True, True, True, True, False))
culprits = st.sampled_from((None, None, *NODES))


class RunMachine(RuleBasedStateMachine):
    """One run of two nodes, one spare and a node that is sometimes added."""

    @initialize(calm=mostly, checkpoints=mostly)
    def begins(self, calm: bool, checkpoints: bool) -> None:
        self.world = World(POLICY, check=check_decision, checkpoints=checkpoints)
        self.committed: set[tuple[int, int]] = set()
        self.answered: list[str] = []
        if calm:
            for name in NODES[:3]:
                self.world.boots(name)
            self.world.reads_catalogue(answer=True)
            self.world.calms()

    def pick(self, number: int, agents: list[Agent]) -> Agent:
        return agents[number % len(agents)]

    def agents(self, **having: bool) -> list[Agent]:
        return [
            agent
            for agent in self.world.agents.values()
            if all(bool(getattr(agent, name)) is value for name, value in having.items())
        ]

    # Agents come and go.

    @rule(name=st.sampled_from(NODES), keeps_memory=st.booleans(), now=st.booleans())
    def an_agent_starts(self, name: str, keeps_memory: bool, now: bool) -> None:
        agent = self.world.boots(name, keeps_memory)
        if now:
            self.world.says_hello(agent)

    @precondition(lambda self: self.agents(is_connected=False))
    @rule(number=picks)
    def an_agent_connects(self, number: int) -> None:
        self.world.says_hello(self.pick(number, self.agents(is_connected=False)))

    @precondition(lambda self: self.agents(is_connected=True))
    @rule(number=picks)
    def a_connection_breaks(self, number: int) -> None:
        self.pick(number, self.agents(is_connected=True)).is_connected = False

    @precondition(lambda self: self.world.agents)
    @rule(number=picks, silent_s=st.sampled_from((0.0, 5.0, 30.0)))
    def an_agent_is_declared_lost(self, number: int, silent_s: float) -> None:
        self.world.loses_agent(self.pick(number, list(self.world.agents.values())), silent_s)

    # Messages.

    @precondition(lambda self: self.agents(outbox=True))
    @rule(number=picks, count=st.integers(1, 4), acknowledged=st.booleans())
    def facts_arrive(self, number: int, count: int, acknowledged: bool) -> None:
        agent = self.pick(number, self.agents(outbox=True))
        for _ in range(min(count, len(agent.outbox))):
            self.world.delivers_fact(agent, acknowledged)

    @precondition(lambda self: self.world.late)
    @rule(number=picks)
    def a_fact_of_a_dead_agent_arrives_late(self, number: int) -> None:
        origin, event = self.world.late.pop(number % len(self.world.late))
        self.world.hears(event, origin)

    @precondition(lambda self: any(r.origin for r in self.world.records))
    @rule(number=st.integers(0, 40))
    def an_old_fact_arrives_again(self, number: int) -> None:
        told = [r for r in self.world.records if r.origin]
        record = told[-1 - number % len(told)]
        self.world.hears(record.event, record.origin)

    @precondition(lambda self: self.agents(inbox=True))
    @rule(number=picks, count=st.integers(1, 3))
    def orders_arrive(self, number: int, count: int) -> None:
        agent = self.pick(number, self.agents(inbox=True))
        for _ in range(min(count, len(agent.inbox))):
            self.world.delivers_order(agent)

    @precondition(lambda self: self.agents(inbox=True))
    @rule(number=picks)
    def an_order_is_lost(self, number: int) -> None:
        self.pick(number, self.agents(inbox=True)).inbox.pop(0)

    # The supervisor.

    @precondition(lambda self: self.world.queue)
    @rule(answer=st.sampled_from(ANSWERS))
    def an_effect_begins(self, answer: str) -> None:
        self.world.carries_out_next(answer)

    @precondition(lambda self: self.world.state.pending)
    @rule(number=picks, ok=st.booleans())
    def an_answer_comes(self, number: int, ok: bool) -> None:
        keys = [
            key
            for key, pending in self.world.state.pending.items()
            if isinstance(pending.action, StartRanks | StopRanks | Pair) or "interval" in key
        ]
        if keys:
            self.answered.append(keys[number % len(keys)])
            self.world.answers(self.answered[-1], ok)

    @precondition(lambda self: self.answered)
    @rule(number=picks, ok=st.booleans())
    def an_answer_comes_twice(self, number: int, ok: bool) -> None:
        self.world.answers(self.answered[number % len(self.answered)], ok)

    @rule(catalogue=st.booleans())
    def the_supervisor_is_replaced(self, catalogue: bool) -> None:
        state = state_of(self.world.records)
        assert repr(state) == repr(self.world.state)
        self.world.restarts(state, catalogue)

    @rule()
    def a_batch_is_collected(self) -> None:
        self.world.is_holding = True

    @rule(seconds=st.sampled_from((0.01, 1.0, 5.0, 30.0, 70.0, 130.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.settle()

    @precondition(lambda self: self.world.state.attempt and self.world.state.attempt.needs_verdict)
    @rule(fault=st.sampled_from(FaultKind), node=culprits)
    def an_end_is_judged(self, fault: FaultKind, node: str | None) -> None:
        self.world.judges(fault.value, CLASS_OF[fault].value, node)

    @precondition(lambda self: self.world.state.attempt and not self.world.whole())
    @rule(fault=st.sampled_from(FaultKind), node=culprits, trains=mostly)
    def the_run_goes_on(self, fault: FaultKind, node: str | None, trains: bool) -> None:
        self.recovers(fault, node, trains=trains)

    def recovers(self, fault: FaultKind, node: str | None, *, trains: bool) -> None:
        self.world.calms()
        if self.world.state.attempt and self.world.state.attempt.needs_verdict:
            self.world.judges(fault.value, CLASS_OF[fault].value, node)
            self.world.calms()
        if self.world.whole() and trains:
            self.world.trains(2)

    @rule()
    def the_catalogue_is_read(self) -> None:
        self.world.reads_catalogue(answer=True)

    @rule()
    def a_slow_listing_begins(self) -> None:
        self.world.lists()

    @rule(state=st.sampled_from(("running", "unknown", "gone")))
    def the_allocation_is_looked_at(self, state: str) -> None:
        self.world.hears(ev.JobObserved(job="job-1", state=state))

    @rule(number=st.integers(0, 9))
    def the_operator_speaks(self, number: int) -> None:
        self.world.hears(ev.OperatorSaid(what="stop" if number == 5 else "snapshot"))

    # Ranks.

    @precondition(lambda self: self.agents(ranks=True))
    @rule(number=picks, rank=picks, code=st.sampled_from(CODES))
    def a_rank_exits(self, number: int, rank: int, code: int) -> None:
        agent = self.pick(number, self.agents(ranks=True))
        agent.exits(sorted(agent.ranks)[rank % len(agent.ranks)], code)

    @precondition(lambda self: self.agents(is_stopping=True))
    @rule(number=picks, code=st.sampled_from((0, -9, -15)))
    def stopped_ranks_die(self, number: int, code: int) -> None:
        self.pick(number, self.agents(is_stopping=True)).kill_all(code)

    @precondition(lambda self: self.world.whole())
    @rule()
    def all_ranks_finish(self) -> None:
        for agent in self.world.whole():
            for rank in sorted(agent.ranks):
                agent.exits(rank, 0)

    @precondition(lambda self: self.agents(ranks=True))
    @rule(number=picks)
    def a_rank_hangs(self, number: int) -> None:
        agent = self.pick(number, self.agents(ranks=True))
        self.world.hears(
            ev.RankOverdue(
                attempt=agent.attempt,
                node=agent.node,
                rank=min(agent.ranks),
                phase="step",
                step=self.world.step,
                for_s=3.0,
            )
        )

    @precondition(lambda self: self.world.whole())
    @rule(steps=st.integers(1, 5))
    def all_ranks_train(self, steps: int) -> None:
        self.world.trains(steps)

    @precondition(lambda self: self.world.whole())
    @rule(steps=st.integers(0, 5), everybody=mostly, calm=st.booleans())
    def all_ranks_save(self, steps: int, everybody: bool, calm: bool) -> None:
        self.world.saves(steps)
        for agent in self.world.whole()[: None if everybody else 1]:
            self.world.uploads(agent)
        if calm:
            self.world.calms()

    @precondition(lambda self: self.agents(staged=True))
    @rule(number=picks)
    def an_uploader_stores_its_shards(self, number: int) -> None:
        self.world.uploads(self.pick(number, self.agents(staged=True)))

    @precondition(lambda self: self.agents(staged=True))
    @rule(number=picks, everybody=mostly, tier=st.sampled_from((ev.PEER, ev.PEER, ev.DISK)))
    def copies_are_made(self, number: int, everybody: bool, tier: str) -> None:
        agents = self.agents(staged=True)
        for agent in agents if everybody else [self.pick(number, agents)]:
            self.world.copies(agent, tier)

    @precondition(lambda self: self.world.whole())
    @rule(number=picks, everybody=st.booleans(), tier=st.sampled_from((ev.PEER, ev.DISK)))
    def nodes_are_replaced_after_a_save(self, number: int, everybody: bool, tier: str) -> None:
        world = self.world
        world.saves(2)
        for agent in world.whole():
            world.copies(agent, tier)
        world.calms()
        whole = list(world.whole())
        for agent in whole if everybody else whole[number % 2 : number % 2 + 1]:
            world.loses_agent(agent, 5.0)
            world.boots(agent.node)
        self.recovers(FaultKind.NODE_LOST, None, trains=True)

    @precondition(lambda self: self.agents(copies=True))
    @rule(number=picks)
    def copies_are_spoilt(self, number: int) -> None:
        """Nobody knows yet, so a fetch finds nothing."""
        self.pick(number, self.agents(copies=True)).copies.clear()

    @rule()
    def all_is_calm_for_a_while(self) -> None:
        self.world.calms()

    # What always holds.

    @invariant()
    def at_most_one_attempt_lives(self) -> None:
        assert len(live_attempts(self.world)) <= 1

    @invariant()
    def no_commit_is_ever_forgotten(self) -> None:
        now = set(self.world.state.commits)
        assert now >= self.committed
        assert now <= set(self.world.manifests.items())
        self.committed = now

    @invariant()
    def orders_that_are_over_are_not_pending(self) -> None:
        attempt = self.world.state.attempt
        for pending in self.world.state.pending.values():
            if isinstance(pending.action, StartRanks | StopRanks):
                assert attempt is not None
                assert attempt.is_live
                assert pending.action.attempt == attempt.number

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        replay(self.world)
        self.come_to_an_end()
        replay(self.world)

    def come_to_an_end(self) -> None:
        """Once nothing new goes wrong, the run goes on or ends; it never hangs."""
        world = self.world
        for name in NODES[:3]:
            if name not in world.agents:
                world.boots(name)
        for _ in range(40):
            world.calms()
            attempt = world.state.attempt
            if world.state.over:
                return
            if attempt is not None and attempt.phase is AttemptPhase.RUNNING and world.whole():
                return
            if not world.state.catalogue_read:
                world.reads_catalogue(answer=True)
            elif attempt is not None and attempt.needs_verdict:
                world.judges("rank_killed", "process", None)
            else:
                self.let_the_rest_of_the_ranks_leave()
                world.now += 20.0
        raise AssertionError(f"stuck: {world.state.waiting_for!r}, {world.state.attempt}")

    def let_the_rest_of_the_ranks_leave(self) -> None:
        """Some ranks ended well and the others wait for them: an overdue rank, in the end."""
        attempt = self.world.state.attempt
        if attempt is None or not attempt.exits:
            return
        for agent in self.world.agents.values():
            for rank in sorted(agent.ranks):
                agent.exits(rank, 0)


TestRun = RunMachine.TestCase
TestRun.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
