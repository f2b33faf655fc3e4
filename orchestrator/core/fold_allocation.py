"""How facts about allocations change the state."""

from collections.abc import Callable
from dataclasses import replace

from orchestrator.core import events as ev
from orchestrator.core.actions import GiveBack, Launch, Unhold
from orchestrator.core.events import Record
from orchestrator.core.state import Allocation, AllocationPhase, RunPhase, State

KEPT_ALLOCATIONS = 64


def asked(state: State, record: Record, key: str, action: Launch) -> State:
    """A further allocation was decided on."""
    new = Allocation(
        key=key,
        nodes=action.nodes,
        asked_at=record.at,
        seq=record.seq,
        exclude=action.exclude,
    )
    over = [a for a in state.allocations if a.is_over][:-KEPT_ALLOCATIONS]
    kept = tuple(a for a in state.allocations if a not in over)
    phase = state.phase if state.attempt is not None else RunPhase.ALLOCATING
    return replace(state, phase=phase, allocations=(*kept, new))


def answered(state: State, record: Record, key: str, event: ev.ActionDone) -> State:
    """The launcher took the request, or refused it."""

    def change(a: Allocation) -> Allocation:
        a = replace(a, seq=record.seq)
        if not event.ok:
            phase = AllocationPhase.REFUSED
            return replace(a, phase=phase, why=event.detail, over_at=record.at)
        # Until it is known to wait, an allocation counts as given: agents may be on their way.
        return replace(a, job=event.detail, phase=AllocationPhase.RUNNING, given_at=record.at)

    return _change(state, lambda a: a.key == key and a.phase is AllocationPhase.ASKED, change)


def joined(state: State, job: str) -> State:
    """An agent came: perhaps the last one of its allocation."""

    def is_whole(a: Allocation) -> bool:
        if a.came or a.is_over or (job and a.job != job):
            return False
        return len(state.members(a)) >= a.nodes

    return _change(state, is_whole, lambda a: replace(a, came=True))


def observed(state: State, record: Record, event: ev.JobObserved) -> State:
    """The launcher says something new of an allocation; one that is gone stays gone."""
    phase = next((p for p in AllocationPhase if p.value == event.state), None)
    if phase is None:
        return state

    def change(a: Allocation) -> Allocation:
        if a.is_over:
            told = event.ending not in (None, ev.Ending.UNKNOWN)
            return replace(a, ending=event.ending, why=event.why, seq=record.seq) if told else a
        a = replace(a, phase=phase, why=event.why, ending=event.ending, seq=record.seq)
        if phase is AllocationPhase.RUNNING:
            return a if a.given_at is not None else replace(a, given_at=record.at)
        if a.is_waiting:
            return replace(a, given_at=None)  # it had been taken for given
        spared = a.came and _trains_without(state, a)
        return replace(a, over_at=a.over_at or record.at, spared=spared)

    state = _change(state, lambda a: bool(a.job) and a.job == event.job, change)
    return _explain(state, event.job, event.ending)


def _trains_without(state: State, allocation: Allocation) -> bool:
    attempt = state.attempt
    if attempt is None or not attempt.is_live or attempt.first_step_at is None:
        return False
    return not set(state.members(allocation)) & set(attempt.nodes)


def explained(state: State) -> State:
    """Tell the incident that was just judged what was known before of how its allocation ended."""
    attempt = state.attempt
    if attempt is None:
        return state
    jobs = {state.nodes[name].job for name in attempt.nodes if name in state.nodes}
    for a in reversed(state.allocations):
        if a.job in jobs and a.over_at is not None and a.over_at >= attempt.ordered_at:
            return _explain(state, a.job, a.ending)
    return state


def _explain(state: State, job: str, ending: ev.Ending | None) -> State:
    """Tell the open incident why its allocation ended, now that it is known."""
    last = state.incidents[-1] if state.incidents else None
    if last is None or last.fault != "allocation_ended" or last.first_step_at is not None:
        return state
    words = {
        ev.Ending.PREEMPTED: f"allocation {job} was preempted",
        ev.Ending.TIME_LIMIT: f"allocation {job} reached its time limit",
    }
    if ending not in words:
        return state
    told = replace(last, fault=ending.value, cause=words[ending])
    return replace(state, incidents=(*state.incidents[:-1], told))


def unheld(state: State, record: Record, action: Unhold) -> State:
    """It was decided to let a held allocation go."""
    return _change(
        state,
        lambda a: a.job == action.job,
        lambda a: replace(a, unheld=a.unheld + 1, unheld_at=record.at, seq=record.seq),
    )


def let_go(state: State, job: str) -> State:
    """A held allocation was let go: it waits again, until it is seen to be held again."""
    return _change(
        state,
        lambda a: a.job == job and a.phase is AllocationPhase.HELD,
        lambda a: replace(a, phase=AllocationPhase.QUEUED, why="let go after a failed launch"),
    )


def given_back(state: State, record: Record, action: GiveBack) -> State:
    """It was decided to end an allocation: how it ends says nothing any more."""
    state = _change(
        state,
        lambda a: a.job == action.job,
        lambda a: replace(a, given_back=True, over_at=record.at),
    )
    nodes = {
        name: replace(n, given_back=True) if n.job == action.job else n
        for name, n in state.nodes.items()
    }
    return replace(state, nodes=nodes)


def _change(
    state: State,
    which: Callable[[Allocation], bool],
    change: Callable[[Allocation], Allocation],
) -> State:
    found = tuple(change(a) if which(a) else a for a in state.allocations)
    return replace(state, allocations=found)
