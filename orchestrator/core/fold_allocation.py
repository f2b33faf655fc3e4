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


def observed(state: State, record: Record, event: ev.JobObserved) -> State:
    """The launcher says something new of an allocation; one that is gone stays gone."""
    phase = next((p for p in AllocationPhase if p.value == event.state), None)
    if phase is None:
        return state

    def change(a: Allocation) -> Allocation:
        is_given = phase is AllocationPhase.RUNNING and a.is_waiting
        given_at = record.at if is_given else a.given_at
        is_over = phase in (AllocationPhase.GONE, AllocationPhase.REFUSED)
        over_at = record.at if is_over and a.over_at is None else a.over_at
        return replace(
            a,
            phase=a.phase if a.is_over else phase,
            why=event.why,
            ending=event.ending,
            seq=record.seq,
            given_at=given_at,
            over_at=over_at,
        )

    state = _change(state, lambda a: bool(a.job) and a.job == event.job, change)
    return _explain(state, event)


def _explain(state: State, event: ev.JobObserved) -> State:
    """Tell the open incident why its allocation ended, now that it is known."""
    last = state.incidents[-1] if state.incidents else None
    known = (ev.Ending.PREEMPTED, ev.Ending.TIME_LIMIT)
    if last is None or last.fault != "allocation_ended" or event.ending not in known:
        return state
    if last.first_step_at is not None:
        return state
    words = {
        ev.Ending.PREEMPTED: f"allocation {event.job} was preempted",
        ev.Ending.TIME_LIMIT: f"allocation {event.job} reached its time limit",
    }
    told = replace(last, fault=event.ending.value, cause=words[event.ending])
    return replace(state, incidents=(*state.incidents[:-1], told))


def unheld(state: State, record: Record, action: Unhold) -> State:
    """It was decided to let a held allocation go."""
    return _change(
        state,
        lambda a: a.job == action.job,
        lambda a: replace(a, unheld=a.unheld + 1, seq=record.seq),
    )


def given_back(state: State, action: GiveBack) -> State:
    """It was decided to end an allocation: how it ends says nothing any more."""
    state = _change(state, lambda a: a.job == action.job, lambda a: replace(a, given_back=True))
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
