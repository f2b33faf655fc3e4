"""The supervisor's Prometheus metrics, collected from a snapshot at each scrape.

What is not known is absent from the scrape, never zero.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from orchestrator.core import budgets
from orchestrator.core.state import RunPhase, State
from orchestrator.views import checkpoint_metrics, folders
from orchestrator.views.families import counter, gauge
from orchestrator.views.goodput import account, phases
from orchestrator.views.history import History

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

Snapshot = Callable[[], tuple[State, History]]


class RunCollector(Collector):
    """Turns the state of one run into metric families."""

    def __init__(self, snapshot: Snapshot, now: Callable[[], float] = time.time) -> None:
        self._snapshot = snapshot
        self._now = now

    def describe(self) -> Iterable[Metric]:
        """Name nothing beforehand: what is collected depends on what is known."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the present state."""
        state, history = self._snapshot()
        if state.run is None:
            return
        run, now = state.run.run, self._now()
        yield from _run(state, run)
        yield from _progress(state, history, run)
        yield from checkpoint_metrics.families(state, history, run, now)
        if state.policy.watches:
            yield from folders.families(state.folders, run, state.over, now)
        yield from _incidents(state, run, now)
        yield from _nodes(state, run)
        yield from _goodput(state, history, run, now)


def render(snapshot: Snapshot, now: Callable[[], float] = time.time) -> bytes:
    """Return the exposition text of a registry that holds only this collector."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(snapshot, now))
    return generate_latest(registry)


def _run(state: State, run: str) -> Iterator[Metric]:
    assert state.run is not None
    attempt = state.attempt
    info = GaugeMetricFamily(
        "everstep_run_info",
        "Always 1; what the run is made of",
        labels=["run", "attempt", "slurm_job_id", "world_size", "nodes"],
    )
    world = attempt.world if attempt else state.run.nodes * state.run.ranks_per_node
    number = attempt.number if attempt else 0
    jobs = ",".join(a.job for a in state.living_allocations if a.job)
    info.add_metric([run, str(number), jobs, str(world), str(state.run.nodes)], 1)
    yield info
    phase = GaugeMetricFamily(
        "everstep_run_phase", "1 for the phase that the run is in", labels=["run", "phase"]
    )
    for each in RunPhase:
        phase.add_metric([run, each.value], float(each is state.phase))
    yield phase
    yield from gauge("supervisor_epoch", "Number of the lease in force", run, state.epoch)
    waiting = float(bool(state.waiting_for))
    yield from gauge("waiting", "1 while the run waits for something outside", run, waiting)


def _progress(state: State, history: History, run: str) -> Iterator[Metric]:
    attempt = state.attempt
    if attempt is not None and attempt.min_step >= 0:
        yield from gauge("step", "Last step that all ranks finished", run, attempt.min_step)
    doc = "When the last finished step was first reported"
    yield from gauge("last_step_timestamp_seconds", doc, run, history.last_step_at())
    if state.tokens:
        yield from gauge("loss", "Loss of the last reported step", run, state.loss)
        yield from counter("useful_tokens", "Tokens trained and kept", run, state.tokens)
    doc = "Mean tokens per second of this attempt"
    yield from gauge("tokens_per_second", doc, run, history.tokens_per_s())
    doc = "Mean seconds of one step (moving average)"
    yield from gauge("step_mean_seconds", doc, run, state.measured.step_s)


def _incidents(state: State, run: str, now: float) -> Iterator[Metric]:
    restarts = CounterMetricFamily(
        "everstep_restarts", "Restarts by class of their cause", labels=["run", "reason_class"]
    )
    counts: dict[str, int] = {}
    for incident in state.incidents:
        if incident.next_attempt is not None:
            counts[incident.fault_class] = counts.get(incident.fault_class, 0) + 1
    for name, value in sorted(counts.items()):
        restarts.add_metric([run, name], value)
    yield restarts
    yield _restart_seconds(state, run)
    opened = GaugeMetricFamily(
        "everstep_incident_open",
        "1 while an incident is not recovered from",
        labels=["run", "class", "node"],
    )
    for incident in state.incidents[-1:]:
        still = float(incident.first_step_at is None)
        opened.add_metric([run, incident.fault_class, incident.node or ""], still)
    yield opened
    left = GaugeMetricFamily(
        "everstep_restart_budget_left", "Restarts left by class", labels=["run", "reason_class"]
    )
    for name, allowed in sorted(state.policy.budget.items()):
        left.add_metric([run, name], max(0, allowed - len(budgets.spent(state, name, now))))
    yield left


def _restart_seconds(state: State, run: str) -> Metric:
    family = HistogramMetricFamily(
        "everstep_restart_seconds", "Time to recover, by phase", labels=["run", "phase"]
    )
    values: dict[str, list[float]] = {}
    for incident in state.incidents:
        for name, value in asdict(phases(incident)).items():
            if value is not None:
                values.setdefault(name.removesuffix("_s"), []).append(value)
    for phase, seen in sorted(values.items()):
        edges = (*BUCKETS_S, math.inf)
        buckets = [
            ("+Inf" if edge == math.inf else str(edge), float(sum(v <= edge for v in seen)))
            for edge in edges
        ]
        family.add_metric([run, phase], buckets, sum(seen))
    return family


def _nodes(state: State, run: str) -> Iterator[Metric]:
    up = GaugeMetricFamily("everstep_node_up", "1 while its agent is there", labels=["run", "node"])
    out = GaugeMetricFamily(
        "everstep_node_quarantined", "1 while it gets no ranks", labels=["run", "node"]
    )
    for node in state.nodes.values():
        up.add_metric([run, node.name], float(node.alive))
        out.add_metric([run, node.name], float(bool(node.excluded)))
    yield up
    yield out


def _goodput(state: State, history: History, run: str, now: float) -> Iterator[Metric]:
    account_ = account(state, history, now)
    yield from gauge("goodput_ratio", "Productive time over wall time", run, account_.ratio)
    time_used = GaugeMetricFamily(
        "everstep_wall_seconds", "Wall time of the run so far, by use", labels=["run", "use"]
    )
    for use, value in account_.seconds.items():
        time_used.add_metric([run, use.value], value)
    yield time_used
