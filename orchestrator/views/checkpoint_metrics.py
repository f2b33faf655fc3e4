"""What Prometheus is told of checkpoints: what the last save cost, and sums over the run."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from orchestrator.core.saves import SaveCost
from orchestrator.core.state import State
from orchestrator.views.families import counter, counters, gauge
from orchestrator.views.history import History


def families(state: State, history: History, run: str, now: float) -> Iterator[Metric]:
    """Yield the families `everstep_checkpoint_*`."""
    interval = state.interval_steps
    yield from gauge("checkpoint_interval_steps", "Steps between saves", run, interval)
    if state.commits:
        doc = "Step of the newest committed checkpoint"
        yield from gauge("checkpoint_last_success_step", doc, run, state.commits[0][0])
    if history.commits:
        yield from _newest(state, history, run, now)
    measured = state.measured
    if measured.stall_s:
        doc = "Blocking time of the last save"
        yield from gauge("checkpoint_stall_seconds", doc, run, measured.stall_s[-1])
    if measured.upload_s:
        doc = "Time until the last checkpoint was in the store"
        yield from gauge("checkpoint_upload_seconds", doc, run, measured.upload_s[-1])
    if state.last_save is not None:
        yield from _cost(state.last_save, run)
    yield from _sums(state, history, run)


def _newest(state: State, history: History, run: str, now: float) -> Iterator[Metric]:
    newest = history.commits[-1]
    doc = "When the newest checkpoint was committed"
    yield from gauge("checkpoint_last_success_timestamp_seconds", doc, run, newest.at)
    yield from gauge("checkpoint_bytes", "Size of the newest checkpoint", run, newest.nbytes)
    if not state.over:
        doc = "Age of the newest committed checkpoint"
        yield from gauge("checkpoint_age_seconds", doc, run, max(0.0, now - newest.at))


def _cost(cost: SaveCost, run: str) -> Iterator[Metric]:
    doc = "Time of the slowest rank's copy of the last committed save"
    yield from gauge("checkpoint_stage_seconds", doc, run, cost.stage_s)
    doc = "Speed at which all ranks together staged the last committed save"
    yield from gauge("checkpoint_stage_bytes_per_second", doc, run, cost.stage_bytes_per_s)
    doc = "Speed at which all ranks together stored the last committed save"
    yield from gauge("checkpoint_upload_bytes_per_second", doc, run, cost.upload_bytes_per_s)


def _sums(state: State, history: History, run: str) -> Iterator[Metric]:
    yield from counter("checkpoint_commits", "Committed saves", run, len(history.commits))
    sums = history.sums
    doc = "Bytes of committed saves that went to the store"
    yield from counter("checkpoint_uploaded_bytes", doc, run, sums.sent_nbytes)
    doc = "Requests of committed saves made again, by the store's code"
    yield from counters("checkpoint_upload_retries", doc, run, "code", sums.retries)
    doc = "Parts of committed saves that were sent twice because they were late"
    yield from counter("checkpoint_hedged_parts", doc, run, sums.hedges)
    failures = {"commit_refused": len(state.refused), "restore_failed": len(state.quarantined)}
    doc = "Committed checkpoints that retention deleted"
    yield from counter("checkpoint_deletions", doc, run, state.deleted)
    doc = "Checkpoints that came to nothing"
    yield from counters("checkpoint_failures", doc, run, "reason", failures)
    doc = "Saves of this attempt skipped since the previous upload was not done"
    yield from gauge("checkpoint_skipped_saves", doc, run, state.skipped_saves)
    doc = "Saves of this attempt that did not stay: replaced unsent, or changed while copied"
    yield from gauge("checkpoint_dropped_saves", doc, run, state.dropped_saves)
