"""Why a decision was made, and why nothing happens: cause, evidence in words, what came of it."""

from collections.abc import Sequence
from typing import Any

from orchestrator.core import events as ev
from orchestrator.core.actions import (
    Action,
    Commit,
    Finish,
    SetInterval,
    StartRanks,
    StopRanks,
    Wait,
)
from orchestrator.core.record import Record
from orchestrator.core.state import AttemptPhase, RunPhase, State
from orchestrator.views.events import describe, describe_action
from orchestrator.views.status import headline

ROUTINE = (Commit, Wait)


def decisions(records: Sequence[Record]) -> tuple[Record, ...]:
    """Return the records of decisions, oldest first."""
    return tuple(r for r in records if isinstance(r.event, ev.DecisionMade))


def find(
    state: State, records: Sequence[Record], *, seq: int | None = None, incident: int | None = None
) -> Record | None:
    """Find the decision to explain.

    Args:
        state: The state after `records`.
        records: The journal.
        seq: The journal number of a decision.
        incident: The number of an incident: its restart, or the end of the run.
        With neither, the last decision that was no routine (a commit, a wait).

    Returns:
        The record, or None when there is no such decision (yet).
    """
    made = decisions(records)
    if seq is not None:
        return next((r for r in made if r.seq == seq), None)
    if incident is not None:
        return _of_incident(state, made, incident)
    chosen = [r for r in made if not isinstance(_action(r), ROUTINE)]
    return chosen[-1] if chosen else (made[-1] if made else None)


def explain(state: State, records: Sequence[Record], record: Record) -> dict[str, Any]:
    """Explain one decision as a JSON object.

    `now_waiting` and `idle` tell why nothing else is happening at the journal's end.
    """
    assert isinstance(record.event, ev.DecisionMade)
    decision = record.event.decision
    by_seq = {r.seq: r for r in records}
    return {
        "run": state.run.run if state.run else None,
        "seq": record.seq,
        "at": record.at,
        "decision": describe_action(decision.action),
        "rule": decision.rule,
        "reason": decision.reason,
        "key": decision.key,
        "cause": _cause(by_seq, decision.evidence),
        "evidence": [
            {"seq": n, "at": by_seq[n].at, "text": describe(by_seq[n].event)}
            for n in dict.fromkeys(decision.evidence)
            if n in by_seq
        ],
        "outcome": [
            {"seq": r.seq, "at": r.at, "text": text}
            for r, text in _came_of_it(records, record, decision.action)
        ],
        **idle(state),
    }


def idle(state: State) -> dict[str, Any]:
    """Say why nothing else is happening right now."""
    pending = [
        {"key": p.key, "since": p.at, "text": describe_action(p.action)}
        for p in state.pending.values()
        if not state.over
    ]
    return {
        "phase": state.phase.value,
        "now_waiting": state.waiting_for or None,
        "pending": pending,
        "idle": _why_idle(state, [str(p["text"]) for p in pending]),
    }


def _why_idle(state: State, pending: list[str]) -> str:
    if state.outcome is not None:
        return headline(state)
    if state.waiting_for:
        return f"it waits: {state.waiting_for}"
    attempt = state.attempt
    if attempt is not None and attempt.phase is AttemptPhase.RUNNING:
        if state.phase is RunPhase.RUNNING:
            return "nothing needs doing: all ranks are training"
        return f"attempt {attempt.number} is on its way to its first step"
    if attempt is not None and attempt.phase is AttemptPhase.STARTING:
        silent = sorted(set(attempt.nodes) - attempt.started_nodes)
        return f"waiting for {', '.join(silent)} to start the ranks of attempt {attempt.number}"
    if attempt is not None and attempt.phase is AttemptPhase.STOPPING:
        left = [r for r in range(attempt.world) if r not in attempt.exits]
        left = [r for r in left if attempt.node_of(r) not in attempt.lost]
        return f"waiting for rank {', '.join(map(str, left))} to stop"
    return f"in hand: {'; '.join(pending)}" if pending else headline(state)


def _action(record: Record) -> Action:
    assert isinstance(record.event, ev.DecisionMade)
    return record.event.decision.action


def _of_incident(state: State, made: tuple[Record, ...], number: int) -> Record | None:
    found = next((i for i in state.incidents if i.number == number), None)
    if found is None:
        return None
    for record in made:
        action = _action(record)
        if isinstance(action, StartRanks) and action.attempt == found.next_attempt:
            return record
    if found.next_attempt is None:
        return next((r for r in reversed(made) if isinstance(_action(r), Finish)), None)
    return None


def _cause(by_seq: dict[int, Record], evidence: tuple[int, ...]) -> str | None:
    """Take the cause from the verdict among the evidence, if there is one."""
    for n in evidence:
        record = by_seq.get(n)
        if record is not None and isinstance(record.event, ev.FaultJudged):
            return record.event.cause
    return None


def _came_of_it(
    records: Sequence[Record], record: Record, action: Action
) -> list[tuple[Record, str]]:
    assert isinstance(record.event, ev.DecisionMade)
    key = record.event.decision.key
    later = [r for r in records if r.seq > record.seq]
    found = [r for r in later if isinstance(r.event, ev.ActionDone) and r.event.key == key]
    found += [r for r in later if _is_effect(r.event, action)]
    return [(r, describe(r.event)) for r in sorted(found, key=lambda r: r.seq)]


def _is_effect(event: ev.Event, action: Action) -> bool:
    match action, event:
        case StartRanks(attempt=n), ev.RanksStarted(attempt=m):
            return n == m
        case StartRanks(attempt=n), ev.PhaseReached(attempt=m):
            return n == m
        case StartRanks(attempt=n), ev.FaultJudged(attempt=m):
            return n == m
        case StopRanks(attempt=n), ev.RankExited(attempt=m, ours=True):
            return n == m
        case Commit(step=n), ev.CheckpointCommitted(step=m) | ev.CommitRefused(step=m):
            return n == m
        case SetInterval(effective_step=n), ev.CheckpointCommitted(step=m):
            return m >= n
        case _:
            return False
