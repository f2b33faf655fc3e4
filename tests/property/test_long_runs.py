"""Long lives of runs, drawn from a seed: many attempts, commits and supervisors in one journal.

`test_run_machine` finds the shortest way to break a promise; this goes where only hundreds of
events lead. The promises are the same.
"""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from monitors.faults import CLASS_OF, FaultKind
from orchestrator.core import events as ev
from orchestrator.core.actions import Source
from tests.property.promises import replay
from tests.property.test_run_machine import ANSWERS, CODES, NODES, POLICY, RunMachine
from tests.simulated.world import World

PATIENT = replace(
    POLICY, budget={"process": 40, "node": 40, "storage": 20}, same_root_limit=12, node_strikes=9
)
SEEDS = 12
WEIGHTS = {
    "train": 12,
    "save": 14,
    "upload": 4,
    "calm": 10,
    "judge": 10,
    "exit": 4,
    "hang": 1,
    "lose": 2,
    "break": 2,
    "boot": 2,
    "hello": 5,
    "fact": 10,
    "order": 8,
    "drop": 1,
    "again": 3,
    "late": 2,
    "effect": 16,
    "commit": 6,
    "stopped": 5,
    "listing": 1,
    "answer": 2,
    "supervisor": 2,
    "batch": 3,
    "time": 6,
    "snapshot": 1,
    "catalogue": 1,
    "job": 1,
    "finish": 0.05,
    "stop": 0.02,
}


class Life:
    """Draws what happens next; `machine` keeps the promises."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.machine = RunMachine()
        self.machine.begins(calm=True, checkpoints=True)
        self.machine.world.hears(ev.PolicySet(policy=PATIENT))

    @property
    def world(self) -> World:
        return self.machine.world

    def goes_on(self, steps: int) -> None:
        names, weights = list(WEIGHTS), list(WEIGHTS.values())
        for _ in range(steps):
            if self.world.state.over:
                return
            getattr(self, f"_{self.random.choices(names, weights)[0]}")()
            self.machine.at_most_one_attempt_lives()
            self.machine.no_commit_is_ever_forgotten()
            self.machine.orders_that_are_over_are_not_pending()

    def _number(self) -> int:
        return self.random.randrange(8)

    def _train(self) -> None:
        if self.world.whole():
            self.world.trains(self.random.randint(1, 4))

    def _save(self) -> None:
        if self.world.whole():
            self.machine.all_ranks_save(
                steps=self.random.randint(1, 4), everybody=self.random.random() < 0.8, calm=False
            )

    def _upload(self) -> None:
        if staged := self.machine.agents(staged=True):
            self.world.uploads(self.random.choice(staged))

    def _calm(self) -> None:
        self.world.calms()

    def _judge(self) -> None:
        attempt = self.world.state.attempt
        if attempt is not None and attempt.needs_verdict:
            kinds = [k for k in FaultKind if k not in (FaultKind.USER_ERROR, FaultKind.STORAGE)]
            fault = self.random.choice([*kinds, FaultKind.RESTORE_FAILED])
            node = self.random.choice((None, None, None, *NODES))
            self.world.judges(fault.value, CLASS_OF[fault].value, node)

    def _exit(self) -> None:
        if agents := self.machine.agents(ranks=True):
            agent = self.random.choice(agents)
            agent.exits(self.random.choice(sorted(agent.ranks)), self.random.choice(CODES))

    def _hang(self) -> None:
        if self.machine.agents(ranks=True):
            self.machine.a_rank_hangs(number=self._number())
        if self.random.random() < 0.5:
            self._stops_softly()

    def _stops_softly(self) -> None:
        """Every rank that is told to stop leaves with code 0, as one that handles SIGTERM."""
        while self.world.queue:
            self.world.carries_out_next()
        for agent in self.world.agents.values():
            while agent.inbox:
                self.world.delivers_order(agent)
            if agent.is_stopping:
                agent.kill_all(0)

    def _lose(self) -> None:
        agent = self.random.choice(list(self.world.agents.values()))
        self.world.loses_agent(agent, silent_s=3.0)

    def _break(self) -> None:
        self.random.choice(list(self.world.agents.values())).is_connected = False

    def _boot(self) -> None:
        self.world.boots(self.random.choice(NODES), keeps_memory=self.random.random() < 0.5)

    def _hello(self) -> None:
        if away := self.machine.agents(is_connected=False):
            self.world.says_hello(self.random.choice(away))

    def _fact(self) -> None:
        if self.machine.agents(outbox=True):
            self.machine.facts_arrive(self._number(), 3, self.random.random() < 0.8)

    def _order(self) -> None:
        if self.machine.agents(inbox=True):
            self.machine.orders_arrive(self._number(), 3)

    def _drop(self) -> None:
        if self.machine.agents(inbox=True):
            self.machine.an_order_is_lost(self._number())

    def _again(self) -> None:
        if any(r.origin for r in self.world.records):
            self.machine.an_old_fact_arrives_again(self.random.randrange(40))

    def _late(self) -> None:
        if self.world.late:
            self.machine.a_fact_of_a_dead_agent_arrives_late(self._number())

    def _effect(self) -> None:
        if self.world.queue:
            self.world.carries_out_next(self.random.choice(ANSWERS))

    def _answer(self) -> None:
        if self.world.state.pending:
            self.machine.an_answer_comes(self._number(), self.random.random() < 0.8)
        if self.machine.answered:
            self.machine.an_answer_comes_twice(self._number(), self.random.random() < 0.5)

    def _supervisor(self) -> None:
        self.machine.the_supervisor_is_replaced(catalogue=self.random.random() < 0.7)

    def _commit(self) -> None:
        """All facts arrive, and the store answers as it likes."""
        for agent in self.world.agents.values():
            while agent.outbox:
                self.world.delivers_fact(agent)
        self.world.settle()
        for _ in range(len(self.world.queue)):
            self.world.carries_out_next(self.random.choice(ANSWERS))

    def _stopped(self) -> None:
        if self.machine.agents(is_stopping=True):
            self.machine.stopped_ranks_die(self._number(), self.random.choice((0, 0, -9, -15)))

    def _listing(self) -> None:
        self.world.lists()

    def _batch(self) -> None:
        self.world.is_holding = True

    def _time(self) -> None:
        self.world.now += self.random.choice((0.01, 1.0, 5.0, 30.0, 66.0))
        self.world.settle()

    def _snapshot(self) -> None:
        self.world.hears(ev.OperatorSaid(what="snapshot"))

    def _stop(self) -> None:
        self.world.hears(ev.OperatorSaid(what="stop"))

    def _catalogue(self) -> None:
        self.world.reads_catalogue(answer=self.random.random() < 0.7)

    def _job(self) -> None:
        state = self.random.choice(("running", "unknown"))
        self.world.hears(ev.JobObserved(job="job-1", state=state))

    def _finish(self) -> None:
        if self.world.whole():
            self.machine.all_ranks_finish()


@pytest.fixture(scope="module")
def lives() -> list[World]:
    """What the seeds made, for the last test."""
    return []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_long_life_keeps_every_promise(seed: int, lives: list[World]) -> None:
    life = Life(seed)
    life.goes_on(500)
    lives.append(life.world)
    replay(life.world)
    life.machine.come_to_an_end()
    replay(life.world)


def test_the_lives_were_long_enough_to_be_worth_it(lives: list[World]) -> None:
    if len(lives) < SEEDS:
        pytest.skip("only when all lives were lived")
    starts = [start for world in lives for start in world.starts.values()]
    sources = Counter(s.restore.source for s in starts if s.restore)
    assert len(starts) > 5 * SEEDS
    assert min(sources[Source.MEMORY], sources[Source.STORE]) > 5
    assert sum(len(world.manifests) for world in lives) > 5 * SEEDS
    assert sum(world.epoch for world in lives) > 5 * SEEDS
