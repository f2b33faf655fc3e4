"""Metric families of one value; what is not known makes none."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def gauge(name: str, doc: str, run: str, value: float | None) -> Iterator[Metric]:
    """Yield a gauge, nothing for an unknown or not measured value."""
    if value is not None and value == value:
        family = GaugeMetricFamily(f"everstep_{name}", doc, labels=["run"])
        family.add_metric([run], value)
        yield family


def counter(name: str, doc: str, run: str, value: float) -> Iterator[Metric]:
    """Yield a counter."""
    family = CounterMetricFamily(f"everstep_{name}", doc, labels=["run"])
    family.add_metric([run], value)
    yield family


def counters(
    name: str, doc: str, run: str, label: str, values: Mapping[str, float]
) -> Iterator[Metric]:
    """Yield a counter with a second label."""
    family = CounterMetricFamily(f"everstep_{name}", doc, labels=["run", label])
    for key, value in sorted(values.items()):
        family.add_metric([run, key], value)
    yield family
