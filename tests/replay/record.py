"""Writes the stored journals: `python -m tests.replay.record`.

Run it only when a change of the events or rules is meant to change history; the difference of the
data files then shows what changed.
"""

from dataclasses import replace
from pathlib import Path

from orchestrator.core import events as ev
from orchestrator.core.policy import Policy
from orchestrator.supervisor.journal import render, state_of
from tests.simulated.site import Site
from tests.simulated.world import World

DATA = Path(__file__).parent / "data"
POLICY = Policy(budget={"process": 5, "node": 5, "storage": 3}, final_upload_s=60.0)


def begin(policy: Policy = POLICY) -> World:
    world = World(policy)
    for name in ("n1", "n2", "n3"):
        world.boots(name)
    world.reads_catalogue(answer=True)
    calm(world)
    return world


def calm(world: World, seconds: float = 1.0) -> None:
    world.now += seconds
    world.calms()


def train(world: World, *steps: int) -> None:
    """Train, save and commit, `steps` at a time."""
    for count in steps:
        world.now += count * 0.5
        world.saves(count)
        for agent in world.whole():
            world.uploads(agent)
        calm(world)


def judge(world: World, fault: str, fault_class: str, node: str | None = None) -> None:
    calm(world)
    world.judges(fault, fault_class, node)
    calm(world)


def three_kills() -> World:
    """A rank, a node and the supervisor are killed; the run finishes."""
    world = begin()
    train(world, 4, 4, 8)
    world.trains(3)
    world.agents["n1"].exits(1, -9)
    judge(world, "rank_killed", "process")
    train(world, 8)
    world.loses_agent(world.agents.pop("n2"), silent_s=6.0)
    judge(world, "node_lost", "node", "n2")
    train(world, 8)
    world.restarts(state_of(world.records), catalogue=True)
    calm(world)
    train(world, 8, 8)
    return finished(world)


def finished(world: World) -> World:
    """All ranks come to their end, and the run with them."""
    for agent in world.whole():
        for rank in sorted(agent.ranks):
            agent.exits(rank, 0)
    calm(world)
    assert world.state.over
    return world


def hard_times() -> World:
    """Lost orders, a bad checkpoint, a silent store, a suspect GPU; stopped by the operator."""
    world = begin()
    train(world, 4, 4)
    world.saves(4)
    calm(world)
    for agent in world.whole():
        world.uploads(agent)
        while agent.outbox:
            world.delivers_fact(agent)
    world.carries_out_next("lost")
    calm(world, 3.0)
    world.hears(
        ev.RankOverdue(attempt=1, node="n2", rank=2, phase="step", step=world.step, for_s=2.5)
    )
    judge(world, "hang", "process")
    world.agents["n1"].exits(0, 77, "restore_failed")
    judge(world, "restore_failed", "storage")
    world.agents["n2"].exits(2, 77, "restore_failed")
    world.agents["n1"].is_connected = False
    calm(world)
    world.settle()
    judge_without_orders(world)
    train(world, 4)
    world.hears(ev.OperatorSaid(what="snapshot"))
    calm(world)
    world.agents["n2"].exits(3, -7)
    judge(world, "gpu", "node", "n2")
    train(world, 8)
    world.hears(ev.OperatorSaid(what="stop"))
    calm(world)
    calm(world, 70.0)
    assert world.state.over
    return world


def judge_without_orders(world: World) -> None:
    """The order to start is lost on its way to one node: a slow start, and one more attempt."""
    world.judges("restore_failed", "storage", None)
    while world.queue:
        world.carries_out_next()
    lost, kept = world.agents["n1"], world.agents["n2"]
    lost.inbox.clear()
    world.delivers_order(kept)
    world.delivers_fact(kept)
    world.now += 61.0
    world.settle()
    judge(world, "unknown", "process")


def moving_house() -> World:
    """Drains, a held launch, a bad GPU and lost nodes: many allocations of a run that shrinks."""
    site = Site(tuple(f"n{k + 1}" for k in range(9)))
    policy = replace(POLICY, replace_nodes=True, min_nodes=1)
    world = World(policy, nodes=3, spares=1, ranks_per_node=1, site=site, judges_at_once=True)
    arrive(world, site)
    world.reads_catalogue(answer=True)
    calm(world)
    train(world, 4, 4)
    site.wants_back(world, "n2", "DRAIN: bad fan")
    calm(world)
    train(world, 4)
    (job,) = site.living("queued")
    job.state = "held"
    calm(world)
    arrive(world, site)
    signs_of_a_bad_gpu(world, "n1")
    world.agents["n1"].exits(0, -7)
    calm(world)
    train(world, 4)
    shrink_and_grow(world, site)
    return finished(world)


def signs_of_a_bad_gpu(world: World, name: str) -> None:
    agent = world.agents[name]
    agent.fact(
        ev.SignatureSeen(
            attempt=agent.attempt,
            node=name,
            rank=min(agent.ranks),
            signature="xid_79",
            fault="gpu",
            secondary=False,
            confidence=0.95,
            culprit_node=name,
            culprit_rank=min(agent.ranks),
            text="NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        )
    )


def arrive(world: World, site: Site) -> None:
    """What is in the queue gets its nodes, and agents start on them."""
    calm(world)
    site.goes_well(world)
    calm(world)


def shrink_and_grow(world: World, site: Site) -> None:
    """Too many nodes are lost at once, and others come for them; the first allocation goes back."""
    site.loses_nodes(world, "n3", "n4")
    calm(world)
    train(world, 4)
    arrive(world, site)
    train(world, 4)
    calm(world, 100.0)
    train(world, 4)


def own_folders() -> World:
    """A trainer writes its own checkpoints; a folder fails once, and a rank is killed."""
    world = begin(replace(POLICY, watches=True))
    keep(world, "checkpoint-1", "uploaded", "committed")
    world.trains(4)
    keep(world, "checkpoint-2", "failed")
    world.agents["n1"].exits(1, -9)
    judge(world, "rank_killed", "process")
    keep(world, "checkpoint-1", "known")
    keep(world, "checkpoint-2", "committed")
    keep(world, "checkpoint-1", "removed")
    return finished(world)


def keep(world: World, entry: str, *steps: str) -> None:
    for step in steps:
        is_known, is_failed = step == "known", step == "failed"
        world.agents["n1"].fact(
            ev.FolderWatched(
                node="n1",
                entry=entry,
                step=ev.FolderStep(step),
                version=0 if is_failed else 1,
                nbytes=0 if is_failed else 4096,
                age_s=30.0 if is_known else 0.0,
                why="the store does not answer; tried again" if is_failed else "",
            )
        )
        calm(world)


STORIES = {
    "three_kills": three_kills,
    "hard_times": hard_times,
    "moving_house": moving_house,
    "own_folders": own_folders,
}


def write() -> None:
    DATA.mkdir(exist_ok=True)
    for name, story in STORIES.items():
        lines = b"".join(render(record) for record in story().records)
        (DATA / f"{name}.jsonl").write_bytes(lines)


if __name__ == "__main__":
    write()
