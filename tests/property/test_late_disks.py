"""A run without a store: nodes go, and come back late, in any order, some with empty disks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.actions import Decision, Finish, Outcome, StartRanks
from orchestrator.core.events import DISK
from orchestrator.core.policy import Policy
from tests.property.promises import check_decision, replay
from tests.simulated.world import World

NODES = ("n1", "n2", "n3", "n4")
POLICY = Policy(budget={"process": 40, "node": 40, "storage": 40}, same_root_limit=40, peers=True)
moves = st.tuples(
    st.sampled_from(("goes", "comes", "comes", "comes with an empty disk", "time", "calm", "new")),
    st.sampled_from(NODES),
)


def check(world: World, decision: Decision) -> None:
    check_decision(world, decision)
    if isinstance(decision.action, StartRanks) and decision.action.attempt > 1:
        assert decision.action.restore is not None, "step 0, although copies were on disks"


def happens(world: World, what: str, name: str) -> None:
    agent = world.agents.get(name)
    match what:
        case "goes" if agent is not None and agent.is_connected:
            world.loses_agent(agent, 5.0)
            agent.kill_all()
        case "comes" | "comes with an empty disk":
            new = world.boots(name)
            if what != "comes":
                new.copies.clear()
            world.says_hello(new)
        case "time":
            world.now += 50.0
            world.settle()
        case "calm":
            connected = [a for a in world.agents.values() if a.is_connected]
            for one in connected:
                while one.outbox:
                    world.delivers_fact(one)
        case "new":
            world.restarts(world.state, catalogue=False)
        case _:
            pass


@given(st.lists(moves, max_size=14))
@settings(max_examples=150, deadline=None)
def test_no_order_of_coming_back_makes_it_begin_anew(given_moves: list[tuple[str, str]]) -> None:
    world = World(POLICY, checkpoints=False, judges_at_once=True, check=check)
    for name in NODES[:3]:
        world.boots(name)
    world.calms()
    world.saves(4)
    for agent in world.whole():
        world.copies(agent, DISK)
    world.calms()
    for what, name in given_moves:
        happens(world, what, name)
    for name in NODES:
        if name not in world.agents or not world.agents[name].is_connected:
            world.boots(name)
    world.calms()
    world.now += POLICY.launch_timeout_s + 1
    world.calms()
    ended = [
        r.event.decision.rule
        for r in world.records
        if isinstance(getattr(getattr(r.event, "decision", None), "action", None), Finish)
    ]
    assert ended in ([], ["history_unusable"], ["no_capacity"])
    assert world.state.outcome in (None, Outcome.FAILED)
    assert ended or world.whole(), "neither trains nor ended"
    replay(world)
