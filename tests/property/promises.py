"""What holds for each decision at the moment when it is made, told from the records alone."""

import json

from orchestrator.core import events as ev
from orchestrator.core.actions import (
    Decision,
    Finish,
    Outcome,
    Pair,
    Restore,
    Source,
    StartRanks,
    StopRanks,
)
from orchestrator.core.codec import decode_record, encode
from orchestrator.core.decide import decide
from orchestrator.core.events import DISK, PEER, Replica
from orchestrator.core.fold import fold
from orchestrator.core.state import State
from tests.simulated.world import World


def check_decision(world: World, decision: Decision) -> None:
    """What holds for each decision at the moment when it is made."""
    state, action = world.state, decision.action
    assert decision.reason.strip()
    assert decision.rule
    assert all(1 <= seq <= state.seq for seq in decision.evidence)
    assert list(decision.evidence) == sorted(decision.evidence)
    made = [r.event.decision for r in world.records if isinstance(r.event, ev.DecisionMade)]
    assert decision.key not in {d.key for d in made}, "the same key for two decisions"
    assert not any(isinstance(d.action, Finish) for d in made), "a decision after the finish"
    if isinstance(action, StartRanks):
        check_start(world, action)
    if isinstance(action, StopRanks | Pair):
        assert state.attempt is not None
        assert action.attempt == state.attempt.number
    if isinstance(action, Finish) and action.outcome is Outcome.FINISHED:
        assert exits_of(world) == {0}
        assert state.attempt is not None
        assert state.attempt.number not in world.stopped


def check_start(world: World, start: StartRanks) -> None:
    state = world.state
    assert start.attempt == max(world.starts, default=0) + 1
    check_placement(world, start)
    assert not any(live_attempts(world)), "ranks of an older attempt may live"
    assert not state.stop_requested_seq, "started again after a stop"
    number = max(world.starts, default=0)
    if state.attempt is not None and number not in world.stopped and not state.attempt.lost:
        assert exits_of(world) != {0}, "started again after the end"
    bad = quarantined(world)
    good = [c for c in state.commits if (*c, Source.STORE) not in bad]
    if state.commits or state.committed_before or state.on_disks is not None:
        assert start.restore is not None, "step 0 although there is history"
    if start.restore is not None:
        restore = start.restore
        assert (restore.step, restore.attempt, restore.source) not in bad
        assert restore.step >= max((step for step, _ in good), default=0)
        if restore.source is Source.STORE:
            assert (restore.step, restore.attempt) in good
        else:
            assert len(start.nodes) == len(world.starts[restore.attempt].nodes), "another world"
            check_parts(world, start, restore)


def check_parts(world: World, start: StartRanks, restore: Restore) -> None:
    """Every rank gets its part: of its own node's memory, or of living nodes that have a copy."""
    nodes, count = world.state.nodes, len(start.nodes) * start.ranks_per_node
    fetches = {fetch.rank: fetch for fetch in restore.fetches}
    assert len(fetches) == len(restore.fetches)
    assert bool(fetches) == (restore.source is not Source.MEMORY)
    for rank in range(count):
        own = nodes[start.nodes[rank // start.ranks_per_node]]
        key = (rank, restore.step, restore.attempt)
        if rank not in fetches:
            assert key in {(s.rank, s.step, s.attempt) for s in own.staged}
            continue
        fetch = fetches[rank]
        assert fetch.nodes or fetch.disks
        for tier, names in ((PEER, fetch.nodes), (DISK, fetch.disks)):
            copy = Replica(
                tier=tier, rank=rank, step=restore.step, attempt=restore.attempt, world=count
            )
            for name in names:
                assert nodes[name].alive
                assert copy in nodes[name].replicas


def check_placement(world: World, start: StartRanks) -> None:
    """As many nodes as there are for the run, none that is of no use, the better ones first."""
    nodes = world.state.nodes
    least = world.policy.min_nodes or world.nodes
    assert len(set(start.nodes)) == len(start.nodes)
    assert least <= len(start.nodes) <= world.nodes
    for name in start.nodes:
        assert nodes[name].alive
        assert not nodes[name].excluded
        assert not nodes[name].warned
        assert not nodes[name].given_back
    idle = [n for n in nodes.values() if n.is_usable and n.name not in start.nodes]
    assert len(start.nodes) == world.nodes or not idle, "smaller than it could be"
    if any(nodes[name].leaving for name in start.nodes):
        assert not [n for n in idle if n.is_good and n.name not in start.exclude]


def quarantined(world: World) -> set[tuple[int, int, Source]]:
    """What failed to restore, from the records alone."""
    failed = [
        world.starts[r.event.attempt].restore
        for r in world.records
        if isinstance(r.event, ev.FaultJudged) and r.event.fault == "restore_failed"
    ]
    return {(r.step, r.attempt, r.source) for r in failed if r is not None}


def exits_of(world: World) -> set[int | None]:
    """Exit codes of the last attempt's ranks as journalled; None for one that never came."""
    number = max(world.starts, default=0)
    nodes = world.starts[number].nodes if number else ()
    codes = dict.fromkeys(range(len(nodes) * world.ranks_per_node), None) | {
        r.event.rank: r.event.code
        for r in reversed(world.records)
        if isinstance(r.event, ev.RankExited) and r.event.attempt == number
    }
    return set(codes.values())


def live_attempts(world: World) -> set[int]:
    """Attempts with live ranks on nodes that count as living."""
    return {
        agent.live_attempt
        for agent in world.agents.values()
        if agent.ranks and world.state.is_current(agent.node, agent.incarnation)
    }


def replay(world: World) -> None:
    """The journal tells the same story again, through text and back."""
    state = State()
    for record in world.records:
        text = json.dumps(encode(record), allow_nan=False)
        again = decode_record(json.loads(text))
        assert json.dumps(encode(again), allow_nan=False) == text
        if isinstance(record.event, ev.DecisionMade):
            assert decide(state, record.at, state.policy) == (record.event.decision,)
        state = fold(state, again)
    assert repr(state) == repr(world.state)
