"""`fold(state, record) -> state`: how each fact changes what is known.

One small function per event kind, found in `HANDLERS`; facts about nodes, allocations and the
running attempt are in `fold_node`, `fold_allocation` and `fold_attempt`. A record is counted once:
an event that an agent sends again after a lost answer carries the same origin and changes nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from orchestrator.core import events as ev
from orchestrator.core import fold_allocation as allocations
from orchestrator.core import fold_attempt as attempts
from orchestrator.core import fold_node as nodes
from orchestrator.core.actions import (
    Commit,
    Finish,
    GiveBack,
    Launch,
    NoteNode,
    Pair,
    Prune,
    Quarantine,
    SetInterval,
    Source,
    StartRanks,
    StopRanks,
    Unhold,
    Wait,
)
from orchestrator.core.actions import Snapshot as SnapshotAction
from orchestrator.core.folders import watched
from orchestrator.core.measured import FailedCommit, Measured
from orchestrator.core.record import Record
from orchestrator.core.saves import slowest
from orchestrator.core.state import Pending, Place, RunPhase, State

K = TypeVar("K")
V = TypeVar("V")

KEPT_SAMPLES = 20
KEPT_UPLOADS = 8


def fold(state: State, record: Record) -> State:
    """Return the state after `record`; total, and the same for the same input."""
    event, origin = record.event, record.origin
    state = _expose(state, record.at)
    state = replace(state, seq=record.seq, at=record.at, epoch=max(state.epoch, record.epoch))
    if origin is not None:
        if state.is_fenced(origin.node, origin.incarnation):
            return state
        incarnation, n = state.seen.get(origin.node, ("", 0))
        if incarnation == origin.incarnation and origin.n <= n:
            return state
        state = replace(state, seen={**state.seen, origin.node: (origin.incarnation, origin.n)})
    return HANDLERS[type(event)](state, record, event)


def _expose(state: State, at: float) -> State:
    """Count node-seconds under load since the last record (clock steps back count nothing)."""
    attempt = state.attempt
    if attempt is None or not attempt.is_live or attempt.started_at is None or at <= state.at:
        return state
    node_s = state.measured.node_s + (at - state.at) * len(attempt.nodes)
    return replace(state, measured=replace(state.measured, node_s=node_s))


def _run_requested(state: State, record: Record, event: ev.RunRequested) -> State:
    return replace(
        state,
        run=event,
        requested_at=record.at,
        interval_steps=event.interval_steps,
        last_attempt=event.attempts_before,
        committed_before=event.committed_before,
        on_disks=event.on_disks_before,
    )


def _policy_set(state: State, record: Record, event: ev.PolicySet) -> State:
    return replace(state, policy=event.policy)


def _lease_taken(state: State, record: Record, event: ev.LeaseTaken) -> State:
    return replace(state, epoch=event.epoch, lease_at=record.at)


def _operator_said(state: State, record: Record, event: ev.OperatorSaid) -> State:
    if event.what == "stop":
        return replace(state, stop_requested_seq=record.seq)
    return replace(state, snapshot_requested_seq=record.seq)


def _catalogue_read(state: State, record: Record, event: ev.CatalogueRead) -> State:
    # What is being deleted may still be listed.
    goes = {
        at for p in state.pending.values() if isinstance(p.action, Prune) for at in p.action.places
    }
    commits = tuple(sorted({*state.commits, *event.commits} - goes, reverse=True))
    # Attempts of an older run under this name are counted on: their keys are taken in the store.
    taken = (attempt for _, attempt in (*event.commits, *event.quarantined))
    state = _shun(state, event.quarantined)
    return replace(
        state,
        catalogue_read=True,
        catalogue_problem="",
        commits=commits,
        last_attempt=max([state.last_attempt, *taken]),
    )


def _quarantine_read(state: State, record: Record, event: ev.QuarantineRead) -> State:
    return _shun(state, event.places)


def _retention_planned(state: State, record: Record, event: ev.RetentionPlanned) -> State:
    return replace(state, unkept=event.places, retention_problem=event.problem)


def _prune(state: State, places: tuple[Place, ...]) -> State:
    """Nobody may choose what is about to be deleted, whatever becomes of the deletion."""
    return replace(
        state,
        commits=tuple(c for c in state.commits if c not in places),
        unkept=tuple(p for p in state.unkept if p not in places),
    )


def _shun(state: State, places: Iterable[tuple[int, int]]) -> State:
    """Know of checkpoints that are in quarantine in the store: they are not restored from it."""
    found = frozenset(places)
    return replace(
        state,
        in_quarantine=state.in_quarantine | found,
        quarantined=state.quarantined | {(*place, Source.STORE.value) for place in found},
    )


def _catalogue_unknown(state: State, record: Record, event: ev.CatalogueUnknown) -> State:
    return replace(state, catalogue_problem=event.why)


def _progress(state: State, record: Record, event: ev.Progress) -> State:
    if state.attempt is None or state.attempt.number != event.attempt:
        return state
    state = attempts.progress(state, record, event)
    measured = state.measured
    if event.step_s == event.step_s:
        measured = replace(measured, step_s=event.step_s)
    if event.stall_s == event.stall_s and event.saves > state.saves:
        stalls = (*measured.stall_s, event.stall_s)[-KEPT_SAMPLES:]
        measured = replace(measured, stall_s=stalls)
    return replace(
        state,
        measured=measured,
        loss=event.loss if event.loss == event.loss else state.loss,
        tokens=max(state.tokens, event.tokens),
        saves=event.saves,
        skipped_saves=event.skipped_saves,
        dropped_saves=event.dropped_saves,
        best_step=max(state.best_step, event.min_step),
    )


def _shard_uploaded(state: State, record: Record, event: ev.ShardUploaded) -> State:
    key = (event.step, event.attempt)
    if key in state.commits or key in state.refused:
        return state
    shards = {**state.uploads.get(key, {}), event.rank: event}
    uploads = {**state.uploads, key: shards}
    # Oldest attempts first: what they left half done may be at steps that come again.
    for old in sorted(uploads, key=lambda k: (k[1], k[0]))[:-KEPT_UPLOADS]:
        del uploads[old]
    return replace(state, uploads=uploads)


def _upload_failed(state: State, record: Record, event: ev.UploadFailed) -> State:
    return replace(state, last_upload_error=event.error)


def _committed(state: State, record: Record, event: ev.CheckpointCommitted) -> State:
    key = (event.step, event.attempt)
    shards = state.uploads.get(key, {})
    measured: Measured = state.measured
    if shards:
        upload_s = slowest(shard.upload_s for shard in shards.values())
        if upload_s == upload_s:
            measured = replace(measured, upload_s=(*measured.upload_s, upload_s)[-KEPT_SAMPLES:])
    incidents = tuple(
        replace(i, forgiven=True) if event.step > i.best_step else i for i in state.incidents
    )
    return replace(
        state,
        commits=tuple(sorted({*state.commits, key}, reverse=True)),
        uploads=_without(state.uploads, key),
        failed_commits=_without(state.failed_commits, key),
        measured=measured,
        incidents=incidents,
        committed_at=record.at,
        last_save=event.cost or state.last_save,
    )


def _commit_refused(state: State, record: Record, event: ev.CommitRefused) -> State:
    key = (event.step, event.attempt)
    return replace(
        state,
        refused=state.refused | {key},
        refused_why=event.why,
        uploads=_without(state.uploads, key),
        failed_commits=_without(state.failed_commits, key),
    )


def _folder_watched(state: State, record: Record, event: ev.FolderWatched) -> State:
    return replace(state, folders=watched(state.folders, event, record.at))


def _decision_made(state: State, record: Record, event: ev.DecisionMade) -> State:
    decision = event.decision
    action = decision.action
    if isinstance(action, Wait):
        return replace(state, waiting_for=decision.reason)
    pending = Pending(key=decision.key, action=action, seq=record.seq, at=record.at)
    if isinstance(action, StopRanks):
        state = attempts.drop_orders(state, action.attempt)
    state = replace(state, waiting_for="", pending={**state.pending, decision.key: pending})
    match action:
        case Launch():
            return allocations.asked(state, record, decision.key, action)
        case Unhold():
            return allocations.unheld(state, record, action)
        case GiveBack():
            return allocations.given_back(state, record, action)
        case NoteNode():
            return replace(state, noted=action.incident)
        case Quarantine(step=step, attempt=number):
            return _shun(state, [(step, number)])
        case Prune(places=places):
            return _prune(state, places)
        case StartRanks():
            return attempts.start(state, record, action, decision)
        case StopRanks():
            return attempts.order_stop(state, record, action, decision.reason)
        case SetInterval():
            return replace(
                state,
                interval_steps=action.interval_steps,
                interval_changed_step=state.commits[0][0] if state.commits else -1,
            )
        case Pair():
            return attempts.paired(state, action)
        case SnapshotAction():
            return replace(state, snapshots_done_seq=state.snapshot_requested_seq)
        case Finish(outcome=outcome):
            return replace(
                state, phase=RunPhase.FINISHING, outcome=outcome, outcome_reason=decision.reason
            )
        case _:
            return state


def _action_done(state: State, record: Record, event: ev.ActionDone) -> State:
    done = state.pending.get(event.key)
    if done is None:
        return state
    state = replace(state, pending=_without(state.pending, event.key))
    if isinstance(done.action, Commit):
        return _commit_unanswered(state, record, done.action)
    if isinstance(done.action, Finish):
        return replace(state, over=True, phase=RunPhase.OVER)
    if isinstance(done.action, Prune):
        if not event.ok:
            return replace(state, retention_problem=event.detail)
        deleted = state.deleted + len(done.action.places)
        return replace(state, deleted=deleted, retention_problem="")
    if isinstance(done.action, Launch):
        return allocations.answered(state, record, event.key, event)
    if isinstance(done.action, Unhold) and event.ok:
        return allocations.let_go(state, done.action.job)
    if isinstance(done.action, Pair) and not event.ok:
        return attempts.unpaired(state, record, done.action)
    if isinstance(done.action, SetInterval) and not event.ok:
        return replace(state, interval_steps=done.action.previous_steps)
    return state


def _commit_unanswered(state: State, record: Record, action: Commit) -> State:
    key = (action.step, action.attempt)
    if key not in state.uploads:
        return state  # committed or refused: the outcome comes before the end of its action
    before = state.failed_commits.get(key)
    failed = FailedCommit(times=before.times + 1 if before else 1, at=record.at)
    return replace(state, failed_commits={**state.failed_commits, key: failed})


def _without(table: dict[K, V], key: K) -> dict[K, V]:
    return {k: v for k, v in table.items() if k != key}


def _fault_judged(state: State, record: Record, event: ev.FaultJudged) -> State:
    return allocations.explained(attempts.judged(state, record, event))


HANDLERS: dict[type, Callable[[State, Record, Any], State]] = {
    ev.RunRequested: _run_requested,
    ev.PolicySet: _policy_set,
    ev.LeaseTaken: _lease_taken,
    ev.OperatorSaid: _operator_said,
    ev.CatalogueRead: _catalogue_read,
    ev.QuarantineRead: _quarantine_read,
    ev.RetentionPlanned: _retention_planned,
    ev.CatalogueUnknown: _catalogue_unknown,
    ev.AgentJoined: nodes.joined,
    ev.AgentLost: nodes.lost,
    ev.AgentWarned: nodes.warned,
    ev.NodeLeaving: nodes.leaving,
    ev.LedgerRead: nodes.ledger_read,
    ev.JobObserved: allocations.observed,
    ev.RanksStarted: attempts.ranks_started,
    ev.RanksGone: attempts.ranks_gone,
    ev.RankExited: attempts.rank_exited,
    ev.RankOverdue: attempts.rank_overdue,
    ev.SignatureSeen: attempts.signature_seen,
    ev.PhaseReached: attempts.phase_reached,
    ev.Progress: _progress,
    ev.Staged: nodes.staged,
    ev.Replicated: nodes.replicated,
    ev.ShardUploaded: _shard_uploaded,
    ev.UploadFailed: _upload_failed,
    ev.CheckpointCommitted: _committed,
    ev.CommitRefused: _commit_refused,
    ev.FolderWatched: _folder_watched,
    ev.FaultJudged: _fault_judged,
    ev.DecisionMade: _decision_made,
    ev.ActionDone: _action_done,
}
