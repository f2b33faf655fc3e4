"""Whatever happens to the allocations of a run that may have several of them.

As `test_run_machine`, whose promises hold here as well; the run asks for further nodes, gives
back, leaves nodes that are wanted back or warned, shrinks and grows.
"""

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from monitors.faults import CLASS_OF, FaultKind
from orchestrator.core import events as ev
from orchestrator.core.actions import Decision, Finish, GiveBack, Launch, Outcome, StartRanks
from orchestrator.core.events import Ending
from orchestrator.core.placement import count_good
from orchestrator.core.rules.launch import MOST_FRUITLESS, coming
from orchestrator.core.state import AttemptPhase
from tests.property.test_run_machine import (
    POLICY,
    RunMachine,
    check_decision,
    mostly,
    picks,
    quarantined,
)
from tests.simulated.site import Job, Site
from tests.simulated.world import World

NAMES = tuple(f"n{k + 1}" for k in range(12))
REPLACING = replace(POLICY, replace_nodes=True, min_nodes=1, exclusion_limit=2)
ENDINGS = (*Ending, Ending.PREEMPTED, Ending.TIME_LIMIT, Ending.FAILED, Ending.UNKNOWN)
DRAINS = ("DRAIN: bad fan", "", "")
culprits = st.sampled_from((None, None, *NAMES[:5]))


def check(world: World, decision: Decision) -> None:
    """What holds for each decision, and for those about allocations above all."""
    check_decision(world, decision)
    action = decision.action
    match action:
        case Launch():
            check_launch(world, action)
        case GiveBack():
            check_give_back(world, action)
        case StartRanks():
            check_nothing_lost(world, action)
        case _:
            pass
    if isinstance(action, StartRanks | Launch):
        assert not cancelled(world), "goes on although a person ended it"
    if isinstance(action, Finish):
        is_told = any(a.ending is Ending.CANCELLED for a in world.state.allocations)
        if action.outcome is Outcome.STOPPED:
            assert is_told or world.state.stop_requested_seq
        else:
            assert not cancelled(world)


def check_launch(world: World, action: Launch) -> None:
    state = world.state
    assert not any(isinstance(p.action, Launch) for p in state.pending.values())
    wanted = world.nodes + world.spares
    assert action.nodes > 0
    assert count_good(state) + coming(state, world.now) + action.nodes <= wanted
    assert set(action.exclude) >= {n.name for n in state.nodes.values() if n.excluded}
    assert barren(world) < MOST_FRUITLESS + wanted, "asks for ever for what does not come"


def check_give_back(world: World, action: GiveBack) -> None:
    state = world.state
    (allocation,) = [a for a in state.allocations if a.job == action.job]
    assert not allocation.given_back
    assert not allocation.is_over
    attempt = state.attempt
    if attempt is None or not attempt.is_live:
        return
    assert not [n for n in attempt.manned if state.nodes[n].job == action.job]
    for agent in world.agents.values():
        if agent.job == action.job and state.is_current(agent.node, agent.incarnation):
            assert agent.live_attempt != attempt.number


def check_nothing_lost(world: World, start: StartRanks) -> None:
    """What all ranks saved as they left is what they go on from, if it can be had."""
    attempt, state = world.state.attempt, world.state
    if attempt is None or not attempt.moved or attempt.first_trouble is not None:
        return
    saved = world.saved.get(attempt.number, {})
    if len(saved) < attempt.world or len(set(saved.values())) != 1:
        return
    key = (saved[0], attempt.number)
    is_bad = key in state.refused or any(bad[:2] == key for bad in quarantined(world))
    is_late = world.now - (attempt.over_at or 0.0) > state.policy.final_upload_s
    there = {rank for rank in range(attempt.world) if is_held(world, rank, key)}
    if is_bad or is_late or key[0] in dict(state.commits) or len(there) < attempt.world:
        return  # or another attempt committed this step
    assert start.restore is not None
    assert start.restore.step >= key[0], "a planned move lost steps"


def is_held(world: World, rank: int, key: tuple[int, int]) -> bool:
    """Whether this rank's part is known to be stored, or to lie in its node's memory."""
    state = world.state
    assert state.attempt is not None
    staged = state.nodes[state.attempt.node_of(rank)].staged
    in_memory = any((s.rank, s.step, s.attempt) == (rank, *key) for s in staged)
    return in_memory or rank in state.uploads.get(key, {})


def cancelled(world: World) -> bool:
    """Whether it was told that a person ended an allocation that had agents."""
    ours: set[str] = set()
    manned: set[str] = set()
    for event in (r.event for r in world.records):
        if isinstance(event, ev.DecisionMade) and isinstance(event.decision.action, GiveBack):
            ours.add(event.decision.action.job)
        if isinstance(event, ev.AgentJoined):
            manned.add(event.job)
        is_end = isinstance(event, ev.JobObserved) and event.ending is Ending.CANCELLED
        if is_end and event.job in manned - ours:
            return True
    return False


def barren(world: World) -> int:
    """Count the requests since anything came of one."""
    count, known = 0, set()
    for event in (r.event for r in world.records):
        match event:
            case ev.DecisionMade(decision=Decision(action=Launch())):
                count += 1
            case ev.DecisionMade(decision=Decision(action=GiveBack(), rule="give_back")):
                count = 0 if "has all" in event.decision.reason else count
            case ev.JobObserved(ending=Ending.PREEMPTED):
                count = 0
            case ev.PhaseReached(phase="first_step"):
                count = 0
            case ev.AgentJoined(job=job) if job not in known:
                known.add(job)
                count = 0
    return count


class SiteMachine(RunMachine):
    """A run of three nodes and a spare that may have fewer, at a site with a few more."""

    @initialize(calm=mostly, is_kind=mostly, prompt=st.booleans())
    def begins(self, calm: bool, is_kind: bool, prompt: bool) -> None:
        self.site, self.is_kind = Site(NAMES), is_kind
        self.world = World(
            REPLACING, nodes=3, spares=1, ranks_per_node=1, site=self.site, check=check
        )
        self.world.judges_at_once = prompt
        self.committed: set[tuple[int, int]] = set()
        self.answered: list[str] = []
        if calm:
            self.world.reads_catalogue(answer=True)
            self.all_goes_well()
            self.world.trains(2)

    def jobs(self, *states: str) -> list[Job]:
        return self.site.living(*states)

    def job(self, number: int, *states: str) -> Job:
        found = self.jobs(*states)
        return found[number % len(found)]

    def all_goes_well(self) -> None:
        self.world.calms()
        self.site.goes_well(self.world)
        self.world.calms()

    # Agents: only where a job is.

    @precondition(lambda self: self.jobs("running"))
    @rule(number=picks, which=picks, keeps_memory=st.booleans(), now=st.booleans())
    def an_agent_starts(self, number: int, which: int, keeps_memory: bool, now: bool) -> None:
        members = self.job(number, "running").members
        agent = self.world.boots(members[which % len(members)], keeps_memory)
        if now:
            self.world.says_hello(agent)

    # Jobs.

    @precondition(lambda self: self.jobs("queued"))
    @rule(number=picks)
    def a_job_gets_its_nodes(self, number: int) -> None:
        self.site.gives_nodes(self.job(number, "queued"))

    @precondition(lambda self: self.jobs("queued"))
    @rule(number=picks)
    def a_launch_fails_and_the_job_is_held(self, number: int) -> None:
        job = self.job(number, "queued")
        job.state = "held"
        self.site.is_looked_at(self.world, job)

    @precondition(lambda self: self.jobs())
    @rule(number=picks, ending=st.sampled_from(ENDINGS), dies=mostly)
    def a_job_ends(self, number: int, ending: Ending, dies: bool) -> None:
        self.site.ends(self.job(number), ending)
        if dies:
            self.site.kills_agents(self.world)

    @precondition(lambda self: self.site.jobs)
    @rule(number=picks, unknown=st.booleans())
    def a_job_is_looked_at(self, number: int, unknown: bool) -> None:
        job = list(self.site.jobs.values())[-1 - number % len(self.site.jobs)]
        ending = Ending.UNKNOWN if unknown and job.ending is not None else None
        self.site.is_looked_at(self.world, job, ending)

    @rule()
    def the_allocation_is_looked_at(self) -> None:
        for job in tuple(self.site.jobs.values()):
            self.site.is_looked_at(self.world, job)

    @rule()
    def the_site_is_noticed(self) -> None:
        self.site.is_noticed(self.world)

    @precondition(lambda self: self.jobs("queued") or len(self.world.agents) < 3)
    @rule()
    def the_site_does_its_best(self) -> None:
        self.all_goes_well()

    @precondition(lambda self: self.jobs("running"))
    @rule(
        number=picks,
        signal=st.sampled_from(("USR2", "TERM")),
        which=st.sampled_from((None, None, *NAMES[:6])),
        heard=mostly,
    )
    def agents_are_warned(self, number: int, signal: str, which: str | None, heard: bool) -> None:
        job = self.job(number, "running")
        self.site.warns(self.world, job, signal, lambda name: which in (None, name))
        for agent in self.agents(outbox=True) if heard else ():
            if agent.job == job.number and agent.is_connected:
                while agent.outbox:
                    self.world.delivers_fact(agent)

    @rule(name=st.sampled_from(NAMES[:6]), why=st.sampled_from(DRAINS))
    def a_node_is_wanted_back_or_not(self, name: str, why: str) -> None:
        self.site.wants_back(self.world, name, why)

    @rule(spoken=st.sets(st.sampled_from(NAMES[:6]), max_size=2))
    def the_ledger_is_read(self, spoken: set[str]) -> None:
        self.site.spoken = dict.fromkeys(sorted(spoken), "alice: noises")
        self.site.reads_ledger(self.world)

    # Verdicts: mostly those that the supervisor comes to.

    @precondition(lambda self: self.world.state.attempt and self.world.state.attempt.needs_verdict)
    @rule(fault=st.sampled_from(FaultKind), node=culprits, truly=mostly)
    def an_end_is_judged(self, fault: FaultKind, node: str | None, truly: bool) -> None:
        if truly:
            self.world.judges_truly()
        else:
            self.world.judges(fault.value, CLASS_OF[fault].value, node)

    @precondition(lambda self: self.world.state.attempt and not self.world.whole())
    @rule(trains=mostly)
    def the_run_recovers(self, trains: bool) -> None:
        self.world.calms()
        if self.world.state.attempt and self.world.state.attempt.needs_verdict:
            self.world.judges_truly()
            self.world.calms()
        if self.world.whole() and trains:
            self.world.trains(2)

    def come_to_an_end(self) -> None:
        """Once nothing new goes wrong, the run goes on with all its nodes, or ends.

        At a site that is not kind, no new agent ever comes: then it goes on with what it has.
        """
        world, site = self.world, self.site
        site.spoken.clear()
        for _ in range(150):
            site.reads_ledger(world)
            self.time_goes_on()
            attempt = world.state.attempt
            if world.state.over:
                assert not self.jobs()
                return
            if attempt is not None and attempt.phase is AttemptPhase.RUNNING and world.whole():
                has_stepped = attempt.first_step_at is not None
                if has_stepped and (self.is_complete() or not self.is_kind):
                    return
                world.trains(1)
            if not world.state.catalogue_read:
                world.reads_catalogue(answer=True)
            elif attempt is not None and attempt.needs_verdict:
                world.judges_truly()
            else:
                self.let_the_rest_of_the_ranks_leave()
        state = world.state
        raise AssertionError(f"stuck: {state.waiting_for!r}, {state.attempt}, {state.allocations}")

    def time_goes_on(self) -> None:
        if self.is_kind:
            self.all_goes_well()
        else:
            self.world.calms()
            for job in self.jobs("queued"):
                self.site.gives_nodes(job)
        self.world.now += 20.0
        self.world.settle()

    def is_complete(self) -> bool:
        """Whether it has all that it wants, and no job that it could do without."""
        state, wanted = self.world.state, self.world.nodes + self.world.spares
        assert state.attempt is not None
        good = {n.name for n in state.nodes.values() if n.is_good}
        idle = [j for j in self.jobs() if not set(j.members) & set(state.attempt.nodes)]
        needless = [j for j in idle if len(good - set(j.members)) >= wanted]
        is_whole = len(state.attempt.nodes) == self.world.nodes and len(good) >= wanted
        return is_whole and good >= set(state.attempt.nodes) and not needless


TestAllocations = SiteMachine.TestCase
TestAllocations.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
