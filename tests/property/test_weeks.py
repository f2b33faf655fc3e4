"""A run of weeks at a site that takes its nodes back every few hours: nothing of it is a fault."""

from dataclasses import replace
from random import Random

import pytest

from monitors.faults import FaultClass, FaultKind
from orchestrator.core import events as ev
from orchestrator.core.actions import Outcome
from orchestrator.core.events import Ending
from orchestrator.core.fold_allocation import KEPT_ALLOCATIONS
from tests.property.test_many_allocations import NAMES, REPLACING, SiteMachine
from tests.property.test_run_machine import replay
from tests.simulated.site import Job, Site
from tests.simulated.world import World

STRICT = replace(REPLACING, budget={"process": 0, "node": 0, "storage": 0}, same_root_limit=2)
HOUR_S = 3600.0
EVENTS = 80
FREE = {FaultKind.MOVED, FaultKind.PREEMPTED, FaultKind.TIME_LIMIT, FaultKind.ALLOCATION_ENDED}


class Weeks:
    """Three nodes and a spare; every few hours some of them are wanted back."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.machine = SiteMachine()
        self.machine.begins(calm=True, is_kind=True, prompt=True)
        self.site: Site = self.machine.site
        self.world: World = self.machine.world
        self.world.hears(ev.PolicySet(policy=STRICT))
        self.recovers()

    def trains(self, hours: float) -> None:
        """Train and save; every hour a checkpoint is committed."""
        for _ in range(max(1, int(hours))):
            self.world.now += HOUR_S
            self.world.saves(self.random.randint(1, 6))
            for agent in self.world.whole():
                self.world.uploads(agent)
            self.world.calms()

    def recovers(self) -> None:
        self.machine.come_to_an_end()

    def used(self) -> Job:
        """A job that the attempt has nodes of."""
        assert self.world.state.attempt is not None
        nodes = set(self.world.state.attempt.nodes)
        return next(j for j in self.site.living("running") if nodes & set(j.members))

    def goes(self) -> None:
        """Something is wanted back."""
        getattr(self, self.random.choice(("drain", "preemption", "time_limit", "spare_drain")))()

    def drain(self) -> None:
        assert self.world.state.attempt is not None
        name = self.random.choice(self.world.state.attempt.nodes)
        for node in list(self.site.leaving):  # the last ones were repaired
            self.site.wants_back(self.world, node, "")
        self.site.wants_back(self.world, name, "DRAIN: firmware")

    def spare_drain(self) -> None:
        assert self.world.state.attempt is not None
        spares = {n.name for n in self.world.state.nodes.values() if n.is_good}
        for name in sorted(spares - set(self.world.state.attempt.nodes)):
            self.site.wants_back(self.world, name, "MAINT")

    def preemption(self) -> None:
        job = self.used()
        self.site.warns(self.world, job, "TERM", lambda _: True)
        self.world.calms()
        self.site.ends(job, Ending.PREEMPTED)
        if self.random.random() < 0.3:  # Slurm does not say at once how it ended
            self.site.kills_agents(self.world)
            self.site.is_looked_at(self.world, job, Ending.UNKNOWN)
            self.world.now += 2.0

    def time_limit(self) -> None:
        job = self.used()
        self.site.warns(self.world, job, "USR2", lambda _: True)
        self.world.calms()
        self.world.now += 600.0
        self.world.settle()
        self.site.ends(job, Ending.TIME_LIMIT)

    def replaces_the_supervisor(self) -> None:
        self.world.restarts(self.world.state, catalogue=True)
        self.world.calms()


def saved_by(world: World, attempt: int) -> int:
    """The step that all ranks of an attempt saved when they were told to leave."""
    (step,) = set(world.saved[attempt].values())
    return step


@pytest.mark.parametrize("seed", range(2))
def test_what_the_site_takes_back_costs_no_step_and_no_budget(seed: int) -> None:
    weeks = Weeks(seed)
    world = weeks.world
    for number in range(EVENTS):
        before = world.state.best_step
        weeks.trains(weeks.random.uniform(1, 5))
        assert world.state.best_step > before
        weeks.goes()
        if number % 17 == 0:
            weeks.replaces_the_supervisor()
        weeks.recovers()
        assert world.state.outcome is None, world.state.outcome_reason
    weeks.machine.all_ranks_finish()
    world.calms()
    assert world.state.outcome is Outcome.FINISHED
    assert world.now - world.state.requested_at > 7 * 24 * HOUR_S
    assert not weeks.site.living()
    assert_that_all_was_free(world)
    replay(world)


def assert_that_all_was_free(world: World) -> None:
    incidents = world.state.incidents
    assert len(incidents) > EVENTS / 4
    assert {i.fault for i in incidents} <= {kind.value for kind in FREE}
    assert {i.fault for i in incidents} >= {FaultKind.MOVED.value, FaultKind.PREEMPTED.value}
    assert {i.fault_class for i in incidents} == {FaultClass.FREE.value}
    assert len(world.state.allocations) <= KEPT_ALLOCATIONS + len(NAMES)
    for start in world.starts.values():
        if start.attempt - 1 in world.saved:
            assert start.restore is not None
            assert start.restore.step == saved_by(world, start.attempt - 1)
