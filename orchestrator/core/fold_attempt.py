"""How facts about ranks change the attempt that they belong to, and the open incident.

Facts about any attempt but the current one are kept out: a partitioned node that comes back with
ranks of an old attempt changes nothing here.
"""

from dataclasses import replace

from monitors.faults import FaultKind
from orchestrator.core import disks
from orchestrator.core import events as ev
from orchestrator.core.actions import (
    Decision,
    Pair,
    SetInterval,
    Snapshot,
    StartRanks,
    StopRanks,
)
from orchestrator.core.record import Record
from orchestrator.core.state import (
    Attempt,
    AttemptPhase,
    Clue,
    Incident,
    RunPhase,
    State,
)

KEPT_CLUES = 256
KEPT_INCIDENTS = 512


def start(state: State, record: Record, action: StartRanks, decision: Decision) -> State:
    """A new attempt was ordered; the open incident, if any, gets its decision."""
    attempt = Attempt(
        number=action.attempt,
        nodes=action.nodes,
        ranks_per_node=action.ranks_per_node,
        restore=action.restore,
        phase=AttemptPhase.STARTING,
        ordered_at=record.at,
        ordered_seq=record.seq,
        min_step=action.restore.step if action.restore else -1,
        max_step=action.restore.step if action.restore else -1,
    )
    nodes = dict(state.nodes)
    for name in action.exclude:
        if name in nodes:
            nodes[name] = replace(nodes[name], excluded=decision.reason)
    state = replace(
        state,
        attempt=attempt,
        last_attempt=action.attempt,
        phase=RunPhase.RECOVERING if state.incidents else RunPhase.STARTING,
        nodes=nodes,
        # Counted with the exclusion, not as it is noted: what was decided is to be carried out.
        excluded_lately=state.excluded_lately + len(action.exclude),
        saves=0,
        skipped_saves=0,
        dropped_saves=0,
    )
    return _update_incident(
        state,
        decision=decision.reason,
        rule=decision.rule,
        next_attempt=action.attempt,
        restore=action.restore,
        resumed_step=action.restore.step if action.restore else 0,
    )


def order_stop(state: State, record: Record, action: StopRanks, reason: str) -> State:
    """The attempt was told to stop."""
    attempt = _current(state, action.attempt)
    if attempt is None or not attempt.is_live:
        return state
    attempt = replace(
        attempt,
        phase=AttemptPhase.STOPPING,
        stop_ordered_at=record.at,
        stop_orders=attempt.stop_orders + 1,
        planned_stop=attempt.planned_stop or action.planned,
    )
    if action.moved:
        attempt = replace(attempt, moved=action.moved, moved_why=reason, moved_seq=record.seq)
    return _close_if_over(replace(state, attempt=attempt, phase=RunPhase.STOPPING), record)


def paired(state: State, action: Pair) -> State:
    """Nodes are told where their buddies take copies."""
    attempt = _current(state, action.attempt)
    if attempt is None:
        return state
    return replace(state, attempt=replace(attempt, buddies={**attempt.buddies, **action.buddies}))


def unpaired(state: State, record: Record, action: Pair) -> State:
    """Not all of these nodes could be told."""
    attempt = _current(state, action.attempt)
    if attempt is None:
        return state
    known = {name: at for name, at in attempt.buddies.items() if name not in action.buddies}
    return replace(state, attempt=replace(attempt, buddies=known, unpaired_at=record.at))


def unpair(state: State, node: str) -> State:
    """An agent that comes, or comes again, is told once more."""
    attempt = state.attempt
    if attempt is None or node not in attempt.buddies:
        return state
    known = {name: at for name, at in attempt.buddies.items() if name != node}
    return replace(state, attempt=replace(attempt, buddies=known))


def drop_orders(state: State, number: int) -> State:
    """Nobody must carry out what was ordered for an attempt that stops or is over."""
    pending = {
        key: p
        for key, p in state.pending.items()
        if not isinstance(p.action, StartRanks | StopRanks | SetInterval | Snapshot | Pair)
        or p.action.attempt != number
    }
    return replace(state, pending=pending)


def ranks_started(state: State, record: Record, event: ev.RanksStarted) -> State:
    """One node's ranks run; the attempt runs when all nodes said so."""
    attempt = _current(state, event.attempt)
    if attempt is None or not attempt.is_live:
        return state
    started = attempt.started_nodes | {event.node}
    attempt = replace(attempt, started_nodes=started)
    if attempt.phase is AttemptPhase.STARTING and started >= set(attempt.nodes):
        attempt = replace(attempt, phase=AttemptPhase.RUNNING, started_at=record.at)
        state = _update_incident(state, started_at=record.at)
        # A script without heartbeats gives no further sign: running is all that can be said.
        state = replace(state, phase=RunPhase.RUNNING)
    return replace(state, attempt=attempt)


def ranks_gone(state: State, record: Record, event: ev.RanksGone) -> State:
    """An agent has none of the attempt's ranks left, started or not."""
    attempt = _current(state, event.attempt)
    if attempt is None or not attempt.is_live or event.node not in attempt.nodes:
        return state
    attempt = replace(attempt, clear=attempt.clear | {event.node})
    return _close_if_over(replace(state, attempt=attempt), record)


def phase_reached(state: State, record: Record, event: ev.PhaseReached) -> State:
    """All ranks got as far as restore, step or their first new step."""
    attempt = _current(state, event.attempt)
    if attempt is None or not attempt.is_live:
        return state
    at = record.at - event.age_s
    if event.phase == "restore" and attempt.restoring_at is None:
        state = _update_incident(state, restoring_at=at)
        return replace(state, attempt=replace(attempt, restoring_at=at))
    if event.phase == "step" and attempt.stepping_at is None:
        state = _update_incident(state, stepping_at=at)
        return replace(state, attempt=replace(attempt, stepping_at=at))
    if event.phase == "first_step" and attempt.first_step_at is None:
        state = _update_incident(state, first_step_at=at)
        attempt = replace(attempt, first_step_at=at, min_step=max(attempt.min_step, event.step))
        return replace(state, attempt=attempt)
    return state


def progress(state: State, record: Record, event: ev.Progress) -> State:
    """Steps only grow inside an attempt; a late or repeated report changes nothing."""
    attempt = _current(state, event.attempt)
    if attempt is None:
        return state
    attempt = replace(
        attempt,
        min_step=max(attempt.min_step, event.min_step),
        max_step=max(attempt.max_step, event.max_step),
    )
    return replace(state, attempt=attempt)


def rank_exited(state: State, record: Record, event: ev.RankExited) -> State:
    """A rank ended. Anything but a clean end, or an end that we asked for, is trouble."""
    attempt = _current(state, event.attempt)
    if attempt is None or not attempt.is_live or event.rank in attempt.exits:
        return state
    attempt = replace(attempt, exits={**attempt.exits, event.rank: event.code})
    clue = Clue(
        seq=record.seq,
        at=record.at - event.age_s,
        kind="exit",
        node=event.node,
        rank=event.rank,
        code=event.code,
        ours=event.ours,
        note=event.note,
        text=event.last_line,
        step=attempt.min_step,
    )
    trouble = event.code != 0 and not event.ours
    state = _note(replace(state, attempt=attempt), clue, trouble, since_s=event.age_s)
    return _close_if_over(state, record)


def rank_overdue(state: State, record: Record, event: ev.RankOverdue) -> State:
    """A rank stayed too long in a phase."""
    attempt = _current(state, event.attempt)
    if attempt is None or not attempt.is_live or event.rank in attempt.exits:
        return state
    clue = Clue(
        seq=record.seq,
        at=record.at,
        kind="overdue",
        node=event.node,
        rank=event.rank,
        phase=event.phase,
        step=event.step,
        for_s=event.for_s,
        text=event.why,
    )
    return _note(state, clue, trouble=True, since_s=event.for_s)


def signature_seen(state: State, record: Record, event: ev.SignatureSeen) -> State:
    """A known text: evidence, never trouble by itself (the rank may well go on)."""
    attempt = _current(state, event.attempt)
    if attempt is None or not attempt.is_live:
        return state
    clue = Clue(
        seq=record.seq,
        at=record.at,
        kind="signature",
        node=event.node,
        rank=event.rank,
        signature=event.signature,
        fault=event.fault,
        secondary=event.secondary,
        confidence=event.confidence,
        culprit_node=event.culprit_node,
        culprit_rank=event.culprit_rank,
        text=event.text,
        step=attempt.min_step,
    )
    return _note(state, clue, trouble=False, since_s=0.0)


def lose_node(state: State, record: Record, node: str, why: str, since_s: float) -> State:
    """A node of the placement is gone, and its ranks with it."""
    attempt = state.attempt
    if attempt is None or not attempt.is_live or node not in attempt.nodes:
        return state
    if node in attempt.lost:
        return state
    attempt = replace(attempt, lost=attempt.lost | {node})
    clue = Clue(
        seq=record.seq,
        at=record.at - since_s,
        kind="node_lost",
        node=node,
        text=why,
        step=attempt.min_step,
    )
    trouble = not _all_done_on(attempt, node)
    state = _note(replace(state, attempt=attempt), clue, trouble, since_s)
    return _close_if_over(state, record)


def judged(state: State, record: Record, event: ev.FaultJudged) -> State:
    """The verdict opens an incident, unless the stop was planned."""
    attempt = _current(state, event.attempt)
    if attempt is None or attempt.verdict is not None:
        return state
    attempt = replace(attempt, verdict=event, verdict_seq=record.seq)
    quarantined, node = state.quarantined, event.node
    if event.fault == "restore_failed" and attempt.restore is not None:
        failed = attempt.restore
        quarantined |= {(failed.step, failed.attempt, failed.source.value)}
        if failed.fetches:
            node = None  # whoever told of it did not keep the copies
    if event.fault == FaultKind.STORE_AWAY:
        node = None  # it asked first, and whether the others get an answer is not known
        state = replace(state, catalogue_read=False, catalogue_problem=event.cause)
    first = attempt.first_trouble
    planned_at = (attempt.stop_ordered_at if attempt.moved else None) or record.at
    best_step = max(state.best_step, attempt.min_step)
    incident = Incident(
        number=state.incidents[-1].number + 1 if state.incidents else 1,
        attempt=event.attempt,
        fault=event.fault,
        fault_class=event.fault_class,
        node=node,
        rank=event.rank,
        cause=event.cause,
        fault_at=attempt.trouble_since if first else planned_at,
        detected_at=first.at if first else planned_at,
        stopped_at=attempt.over_at or record.at,
        step=attempt.min_step,
        best_step=best_step,
        evidence=event.evidence,
    )
    incidents = (*state.incidents, incident)[-KEPT_INCIDENTS:]
    return replace(
        state,
        attempt=attempt,
        incidents=incidents,
        quarantined=quarantined,
        on_disks=disks.newest(state),
        best_step=best_step,
        phase=RunPhase.RECOVERING,
    )


def _current(state: State, number: int) -> Attempt | None:
    attempt = state.attempt
    return attempt if attempt is not None and attempt.number == number else None


def _note(state: State, clue: Clue, trouble: bool, since_s: float) -> State:
    attempt = state.attempt
    assert attempt is not None
    clues = (*attempt.clues, clue)[:KEPT_CLUES]  # the earliest tell the cause
    attempt = replace(attempt, clues=clues)
    if trouble and attempt.first_trouble is None:
        seen_at = clue.at + since_s if clue.kind != "overdue" else clue.at
        attempt = replace(
            attempt,
            first_trouble=replace(clue, at=seen_at),
            trouble_since=seen_at - since_s,
        )
        state = replace(state, on_disks=disks.newest(state))  # before anything is replaced
    return replace(state, attempt=attempt)


def _all_done_on(attempt: Attempt, node: str) -> bool:
    ranks = [r for r in range(attempt.world) if attempt.node_of(r) == node]
    return all(attempt.exits.get(rank) == 0 for rank in ranks)


def _close_if_over(state: State, record: Record) -> State:
    attempt = state.attempt
    assert attempt is not None
    if not attempt.is_live:
        return state
    away = attempt.lost | attempt.clear
    if len(attempt.exits) + len(away) * attempt.ranks_per_node < attempt.world:
        return state  # without looking at every rank of a large world at each exit
    gone = (r in attempt.exits or attempt.node_of(r) in away for r in range(attempt.world))
    if not all(gone):
        return state
    over = replace(attempt, phase=AttemptPhase.OVER, over_at=record.at)
    return drop_orders(replace(state, attempt=over), attempt.number)


def _update_incident(state: State, **changes: object) -> State:
    """Change the last incident while its recovery is not complete."""
    if not state.incidents or state.incidents[-1].first_step_at is not None:
        return state
    last = replace(state.incidents[-1], **changes)  # type: ignore[arg-type]
    return replace(state, incidents=(*state.incidents[:-1], last))
