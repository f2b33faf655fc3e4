"""The lines of the journal in words."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.core.codec import encode
from orchestrator.core.events import Event
from orchestrator.core.record import Record
from orchestrator.views import units
from orchestrator.views.saves import cost_json, cost_words


def kind_of(event: Event) -> str:
    """Name an event as filters do: `rank_exited`."""
    name = type(event).__name__
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def kinds() -> tuple[str, ...]:
    """Return every kind that a filter may name."""
    return tuple(
        "".join("_" + c.lower() if c.isupper() else c for c in kind.__name__).lstrip("_")
        for kind in WORDS
    )


def select(records: Sequence[Record], kind: Sequence[str] = ()) -> tuple[Record, ...]:
    """Keep the records of the given kinds; no kind keeps all."""
    return tuple(r for r in records if not kind or kind_of(r.event) in kind)


def describe(event: Event) -> str:
    """Say in one line what happened."""
    return WORDS[type(event)](event)


def row(record: Record) -> dict[str, Any]:
    """Return a record as a JSON object: in words and as it is stored."""
    return {
        "seq": record.seq,
        "at": record.at,
        "epoch": record.epoch,
        "kind": kind_of(record.event),
        "text": describe(record.event),
        "event": encode(record.event),
    }


def line(record: Record) -> str:
    """Render one line for a log: time, number, words."""
    return f"{units.clock(record.at)}  {record.seq:>5}  {describe(record.event)}"


def is_over(records: Sequence[Record]) -> bool:
    """Whether the journal ends with the end of its run."""
    ended = records[-1].event if records else None
    return isinstance(ended, ev.ActionDone) and "/finish/" in ended.key


def origin(restore: act.Restore | None) -> str:
    """Say where an attempt starts from."""
    if restore is None:
        return "from step 0"
    return f"from step {restore.step:,} in {restore.source.words}"


def describe_action(action: act.Action) -> str:
    """Say what is to be done."""
    match action:
        case act.Launch(nodes=nodes):
            text = f"ask for an allocation of {units.count(nodes, 'node')}"
            return text + (f" without {', '.join(action.exclude)}" if action.exclude else "")
        case act.Unhold(job=job):
            text = f"let the held allocation {job} try again"
            return text + (f" without {', '.join(action.exclude)}" if action.exclude else "")
        case act.GiveBack(job=job):
            return f"give allocation {job} back"
        case act.NoteNode():
            text = f"write incident {action.incident} into the ledger of {action.node}"
            if not action.excluded_s:
                return text
            return f"{text} and exclude it for {units.seconds(action.excluded_s)}"
        case act.StartRanks():
            where = ", ".join(action.nodes)
            text = f"start attempt {action.attempt} on {where} {origin(action.restore)}"
            return text + (f", excluding {', '.join(action.exclude)}" if action.exclude else "")
        case act.StopRanks(planned=planned):
            how = "save and leave" if planned else "stop"
            return f"{how} attempt {action.attempt} on {', '.join(action.nodes) or 'no node'}"
        case act.Commit(step=step):
            return f"commit checkpoint {step:,}"
        case act.Quarantine(step=step, attempt=number):
            return f"put checkpoint {step:,} of attempt {number} into quarantine"
        case act.Prune(places=places):
            return f"delete {units.count(len(places), 'checkpoint')} that no rule keeps"
        case act.SetInterval():
            return (
                f"checkpoint every {units.count(action.interval_steps, 'step')} "
                f"(was {action.previous_steps:,}) from step {action.effective_step:,}"
            )
        case act.Pair(buddies=buddies):
            return f"tell {', '.join(buddies)} where copies of their memory go"
        case act.Snapshot(step=step):
            return f"save once at step {step:,}"
        case act.Wait():
            return "wait"
        case act.Finish(outcome=outcome):
            return f"end the run as {outcome.value}"


def _requested(e: ev.RunRequested) -> str:
    size = f"{units.count(e.nodes, 'node')} x {units.count(e.ranks_per_node, 'rank')}"
    saves = f"a checkpoint every {units.count(e.interval_steps, 'step')}"
    return f"run {e.run}: {size}, {e.spares} spare, {saves if e.checkpoints else 'no checkpoints'}"


def _joined(e: ev.AgentJoined) -> str:
    held = f", {units.count(len(e.staged), 'snapshot')} in its memory" if e.staged else ""
    return f"{e.node} joined{held}" + (f", not fit for ranks: {e.unfit}" if e.unfit else "")


def _exited(e: ev.RankExited) -> str:
    text = f"rank {e.rank} on {e.node} {units.exit_code(e.code)}"
    text += f" ({e.note.replace('_', ' ')})" if e.note else ""
    if e.ours:
        return text + ", as it was told to"
    return text + (f"; its last line: {e.last_line}" if e.last_line and e.code else "")


def _overdue(e: ev.RankOverdue) -> str:
    where = f"rank {e.rank} on {e.node}"
    return f"{where} is {units.seconds(e.for_s)} overdue in phase {e.phase} after step {e.step:,}"


def _signature(e: ev.SignatureSeen) -> str:
    blamed = [e.culprit_node, f"rank {e.culprit_rank}" if e.culprit_rank is not None else ""]
    named = " ".join(part for part in blamed if part)
    points = f"points at {named}" if named else "culprit unknown"
    side = "a consequence" if e.secondary else e.fault.replace("_", " ")
    return f"rank {e.rank} on {e.node} wrote {e.signature} ({side}, {points}): {e.text}"


def _phase(e: ev.PhaseReached) -> str:
    match e.phase:
        case "restore":
            return f"attempt {e.attempt}: all ranks are up and restoring"
        case "step":
            return f"attempt {e.attempt}: all ranks train, at step {max(e.step, 0):,}"
        case _:
            return f"attempt {e.attempt}: first new step, {e.step:,}, is done"


def _progress(e: ev.Progress) -> str:
    text = f"step {e.min_step:,}" + (f"..{e.max_step:,}" if e.max_step != e.min_step else "")
    text += f", loss {units.number(e.loss)}" if math.isfinite(e.loss) else ""
    return text + (f", {units.seconds(e.step_s)} a step" if math.isfinite(e.step_s) else "")


def _staged(e: ev.Staged) -> str:
    steps = sorted({shard.step for shard in e.shards})
    return f"{e.node} holds in memory: step " + (", ".join(map(str, steps)) or "none")


def _replicated(e: ev.Replicated) -> str:
    if not e.address:
        return f"{e.node} takes no copies now"
    held = {tier: {r.step for r in e.replicas if r.tier == tier} for tier in (ev.PEER, ev.DISK)}
    parts = [
        f"{where} of step {', '.join(map(str, sorted(steps)))}"
        for where, steps in (("for others", held[ev.PEER]), ("on its disk", held[ev.DISK]))
        if steps
    ]
    return f"{e.node} keeps copies " + (" and ".join(parts) or "of nothing yet")


def _judged(e: ev.FaultJudged) -> str:
    blame = [e.node or "", f"rank {e.rank}" if e.rank is not None else ""]
    who = " ".join(part for part in blame if part) or "nobody known"
    kind = e.fault.replace("_", " ")
    return f"verdict on attempt {e.attempt}: {e.cause} ({kind}, {who}, {e.confidence:.0%} sure)"


def _decided(e: ev.DecisionMade) -> str:
    decision = e.decision
    if isinstance(decision.action, act.Wait):
        return f"decided to wait: {decision.reason}"
    return f"decided to {describe_action(decision.action)}, because {decision.reason}"


def _done(e: ev.ActionDone) -> str:
    detail = f": {e.detail}" if e.detail else ""
    return f"{'done' if e.ok else 'failed'}: {e.key}{detail}"


def _job(e: ev.JobObserved) -> str:
    ending = f", {e.ending.replace('_', ' ')}" if e.ending else ""
    return f"allocation {e.job} is {e.state}{ending}" + (f": {e.why}" if e.why else "")


def _warned(e: ev.AgentWarned) -> str:
    text = f"{e.node} was warned by SIG{e.signal} that its allocation ends"
    return text + (f" in {units.seconds(e.left_s)}" if math.isfinite(e.left_s) else "")


def _leaving(e: ev.NodeLeaving) -> str:
    return f"{e.node} is wanted back: {e.why}" if e.why else f"{e.node} may stay after all"


def _ledger(e: ev.LedgerRead) -> str:
    named = "; ".join(f"{node} ({why})" for node, why in sorted(e.excluded.items()))
    return f"the ledger of nodes excludes {named or 'no node'}"


def _uploaded(e: ev.ShardUploaded) -> str:
    took = f" in {units.seconds(e.upload_s)}" if math.isfinite(e.upload_s) else ""
    how = f"{units.size(e.nbytes)}{took}"
    return f"rank {e.rank} stored its part of step {e.step:,} ({how})"


def _committed(e: ev.CheckpointCommitted) -> str:
    text = f"checkpoint {e.step:,} is committed ({units.size(e.nbytes)})"
    words = cost_words(cost_json(e.cost))
    return f"{text}: {words}" if words else text


def _folder(e: ev.FolderWatched) -> str:
    name = f"folder {e.entry}" if e.entry else "the watched directory"
    size = f" ({units.size(e.nbytes)})" if e.nbytes else ""
    match e.step:
        case ev.FolderStep.FAILED:
            return f"{name} could not be kept by {e.node}: {e.why}"
        case ev.FolderStep.COMMITTED:
            return f"{name} is committed{size}"
        case ev.FolderStep.KNOWN:
            return f"{name} was committed before{size}"
        case ev.FolderStep.UPLOADED:
            took = f" in {units.seconds(e.upload_s)}" if math.isfinite(e.upload_s) else ""
            return f"{e.node} stored its part of {name}{size}{took}"
        case ev.FolderStep.REMOVED:
            return f"{name} is committed and was deleted from {e.node}"


WORDS: dict[type, Callable[[Any], str]] = {
    ev.RunRequested: _requested,
    ev.PolicySet: lambda e: (
        "limits set: restarts allowed "
        + (
            ", ".join(f"{name} {n}" for name, n in sorted(e.policy.budget.items()))
            or "without bound"
        )
    ),
    ev.LeaseTaken: lambda e: f"supervisor {e.holder} took over as number {e.epoch}",
    ev.OperatorSaid: lambda e: f"the operator asked for: {e.what}",
    ev.CatalogueRead: lambda e: (
        f"the store holds {units.count(len(e.commits), 'checkpoint')}"
        + (f", the newest of step {e.commits[0][0]:,}" if e.commits else "")
        + (f", and {len(e.quarantined)} in quarantine" if e.quarantined else "")
    ),
    ev.QuarantineRead: lambda e: (
        "in quarantine now: " + ", ".join(f"step {s:,} of attempt {a}" for s, a in e.places)
    ),
    ev.RetentionPlanned: lambda e: (
        f"it is not known what to delete: {e.problem}"
        if e.problem
        else f"no rule keeps {units.count(len(e.places), 'checkpoint')}"
    ),
    ev.CatalogueUnknown: lambda e: f"the store gave no list of checkpoints: {e.why}",
    ev.AgentJoined: _joined,
    ev.AgentLost: lambda e: f"{e.node} is gone: {e.why}",
    ev.AgentWarned: _warned,
    ev.NodeLeaving: _leaving,
    ev.LedgerRead: _ledger,
    ev.JobObserved: _job,
    ev.RanksStarted: lambda e: f"{e.node} started {units.ranks(e.ranks)} of attempt {e.attempt}",
    ev.RanksGone: lambda e: f"{e.node} has no rank of attempt {e.attempt} left",
    ev.RankExited: _exited,
    ev.RankOverdue: _overdue,
    ev.SignatureSeen: _signature,
    ev.PhaseReached: _phase,
    ev.Progress: _progress,
    ev.Staged: _staged,
    ev.Replicated: _replicated,
    ev.ShardUploaded: _uploaded,
    ev.UploadFailed: lambda e: f"rank {e.rank} could not store step {e.step:,}: {e.error}",
    ev.CheckpointCommitted: _committed,
    ev.CommitRefused: lambda e: f"checkpoint {e.step:,} was refused: {e.why}",
    ev.FolderWatched: _folder,
    ev.FaultJudged: _judged,
    ev.DecisionMade: _decided,
    ev.ActionDone: _done,
}
