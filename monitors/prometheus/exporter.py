"""The metrics of one node, in the text format of Prometheus.

Every scrape takes a fresh snapshot and is built from it alone. No value is stored in a metric
object, so a rank that died, a GPU that is lost or a source that is silent is absent from the next
scrape instead of showing its last value for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from monitors.gpu.readings import GpuReading
from monitors.observations import Observation, Ok
from monitors.prometheus.snapshot import NodeSnapshot

__all__ = ["CONTENT_TYPE", "PHASES", "NodeExporter"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
# A closed list, so that a label never grows with what a script writes.
PHASES = ("init", "compile", "restore", "step", "checkpoint", "eval", "finish", "other")

_GPU_FIELDS: tuple[tuple[str, str, Callable[[GpuReading], Observation[float]]], ...] = (
    ("busy_ratio", "Share of the last sample window with a kernel running", lambda g: g.busy_ratio),
    ("memory_used_bytes", "Device memory in use", lambda g: g.memory_used_bytes),
    ("memory_total_bytes", "Device memory there is", lambda g: g.memory_total_bytes),
    ("power_watts", "Draw of the board", lambda g: g.power_watts),
    ("temperature_celsius", "Temperature of the chip", lambda g: g.temperature_celsius),
)


class NodeExporter:
    """Renders one node. Holds no values, only the way to get them."""

    def __init__(self, snapshot: Callable[[], NodeSnapshot]) -> None:
        """Take `snapshot`, which is called once for each scrape and must be cheap."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_NodeCollector(snapshot))

    def render(self) -> bytes:
        """Return the page; its content type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class _NodeCollector(Collector):
    def __init__(self, snapshot: Callable[[], NodeSnapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering takes no snapshot."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have at least one value."""
        snapshot = self._snapshot()
        families = [
            *_about(snapshot),
            *_ranks(snapshot),
            *_host(snapshot),
            *_gpus(snapshot),
        ]
        yield from (family for family in families if family.samples)


def _about(snapshot: NodeSnapshot) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "everstep_node_info",
        "Run and attempt that this node works for",
        labels=["run", "node", "attempt"],
    )
    info.add_metric([snapshot.run, snapshot.node, str(snapshot.attempt)], 1.0)
    yield info
    lines = CounterMetricFamily("everstep_log_lines", "Log lines read", labels=["run", "node"])
    lines.add_metric([snapshot.run, snapshot.node], float(snapshot.log_lines))
    yield lines
    doc = "Known failure lines seen"
    yield _counts(snapshot, "signature_matches", doc, "signature", snapshot.signature_matches)
    doc = "Snapshots that could not be copied to another node or a disk; each is tried again"
    yield _counts(snapshot, "copy_failures", doc, "tier", snapshot.copy_failures)
    sources = GaugeMetricFamily(
        "everstep_source_last_success_timestamp_seconds",
        "When a source last gave a good answer",
        labels=["node", "source"],
    )
    for source, at in sorted(snapshot.sources.items()):
        sources.add_metric([snapshot.node, source], at)
    yield sources


def _counts(
    snapshot: NodeSnapshot, name: str, doc: str, label: str, counts: Mapping[str, int]
) -> Metric:
    family = CounterMetricFamily(f"everstep_{name}", doc, labels=["run", "node", label])
    for value, count in sorted(counts.items()):
        family.add_metric([snapshot.run, snapshot.node, value], float(count))
    return family


def _ranks(snapshot: NodeSnapshot) -> Iterator[Metric]:
    labels = ["run", "node", "rank"]
    step = GaugeMetricFamily("everstep_rank_step", "Last finished step", labels=labels)
    age = GaugeMetricFamily(
        "everstep_rank_heartbeat_age_seconds", "Time since the last sign of life", labels=labels
    )
    phase = GaugeMetricFamily(
        "everstep_rank_phase", "1 for what the rank is doing, else 0", labels=[*labels, "phase"]
    )
    for sample in snapshot.ranks:
        where = [snapshot.run, snapshot.node, str(sample.rank)]
        if sample.step is not None:
            step.add_metric(where, float(sample.step))
        if sample.heartbeat_age_s is not None:
            age.add_metric(where, sample.heartbeat_age_s)
        if sample.phase:
            now = sample.phase if sample.phase in PHASES else "other"
            for name in PHASES:
                phase.add_metric([*where, name], float(name == now))
    yield from (step, age, phase)


def _host(snapshot: NodeSnapshot) -> Iterator[Metric]:
    if not isinstance(snapshot.host, Ok):
        return
    host = snapshot.host.value
    for name, text, value in (
        ("load1", "Processes that ran or waited, mean of one minute", host.load1),
        ("memory_total_bytes", "Memory of the node", float(host.memory_total_bytes)),
        ("memory_available_bytes", "Memory still to be had", float(host.memory_available_bytes)),
    ):
        family = GaugeMetricFamily(f"everstep_node_{name}", text, labels=["node"])
        family.add_metric([snapshot.node], value)
        yield family


def _gpus(snapshot: NodeSnapshot) -> Iterator[Metric]:
    labels = ["node", "gpu", "uuid"]
    answers = GaugeMetricFamily(
        "everstep_gpu_answers",
        "1 when the GPU answers its driver, 0 when it does not",
        labels=labels,
    )
    for gpu in snapshot.gpus:
        heard = any(isinstance(get(gpu), Ok) for _, _, get in _GPU_FIELDS)
        answers.add_metric([snapshot.node, str(gpu.index), gpu.uuid], float(heard))
    yield answers
    for name, text, get in _GPU_FIELDS:
        family = GaugeMetricFamily(f"everstep_gpu_{name}", text, labels=labels)
        for gpu in snapshot.gpus:
            value = get(gpu)
            if isinstance(value, Ok):
                family.add_metric([snapshot.node, str(gpu.index), gpu.uuid], value.value)
        yield family
