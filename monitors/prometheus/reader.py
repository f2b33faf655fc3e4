"""Asks an exporter and returns what it says about each node.

No answer, a bad answer and an answer without the wanted value are three different things, and none
of them is zero.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import client
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from monitors.gpu.readings import GpuReading
from monitors.host import HostReading
from monitors.observations import NotMeasured, Observation, Ok, Unknown
from monitors.prometheus.names import BLANK_FROM, BLANK_INT32, GPU_FIELDS
from monitors.prometheus.snapshot import RankSample

MAX_BYTES = 16 * 1024 * 1024
ATTEMPTS = 2
_CHUNK = 65536
_NODE_LABELS = ("node", "hostname", "Hostname")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """What one exporter said about one node.

    Attributes:
        node: Name of the node, "" when the exporter does not tell.
        host: Load and memory.
        gpus: One reading for each GPU named, by index.
        ranks: Ranks that the exporter knows, by number.
        sources: Unix seconds of the last good answer of each of its own sources.
        signature_matches: How often each known failure line was seen, by id.
    """

    node: str
    host: Observation[HostReading]
    gpus: tuple[GpuReading, ...] = ()
    ranks: tuple[RankSample, ...] = ()
    sources: Mapping[str, float] = field(default_factory=dict)
    signature_matches: Mapping[str, int] = field(default_factory=dict)


def fetch(
    url: str, *, timeout_s: float = 5.0, clock: Callable[[], float] = time.time
) -> Observation[tuple[NodeReading, ...]]:
    """Ask the exporter at `url`, which may be ours or dcgm-exporter.

    Args:
        url: For example `http://n1:9400/metrics`.
        timeout_s: For one try, from connecting to the last byte; there are two.
        clock: Gives the time of the reading.

    Returns:
        One reading for each node, or `Unknown` with the reason. Raises nothing.
    """
    at = clock()
    retrying = Retrying(
        retry=retry_if_exception_type((OSError, client.HTTPException)),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.1, max=0.5),
        reraise=True,
    )
    try:
        text = retrying(_get, url, timeout_s)
    except (OSError, client.HTTPException, ValueError) as error:
        why = f"{url}: {type(error).__name__}: {error}"
        return Unknown(why=why, source=url, at=at)
    return parse(text, source=url, at=at)


def parse(text: str, *, source: str, at: float) -> Observation[tuple[NodeReading, ...]]:
    """Return what a page of metrics says about each node, `Unknown` when it is not such a page.

    Args:
        text: The page.
        source: Who sent it.
        at: Unix seconds at which it was asked for.
    """
    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(_node_of(sample), []).append(sample)
    except (ValueError, KeyError, IndexError) as error:
        return Unknown(why=f"not a page of metrics: {error}", source=source, at=at)
    if not samples:
        return Unknown(why="the page holds no metrics", source=source, at=at)
    nodes = tuple(_Page(rows, source, at).reading(node) for node, rows in sorted(samples.items()))
    return Ok(value=nodes, source=source, at=at)


def _node_of(sample: Sample) -> str:
    return next((sample.labels[k] for k in _NODE_LABELS if sample.labels.get(k)), "")


class _Page:
    """The samples of one node."""

    def __init__(self, samples: Iterable[Sample], source: str, at: float) -> None:
        self._samples = [s for s in samples if _is_value(s)]
        self._source = source
        self._at = at

    def reading(self, node: str) -> NodeReading:
        matches = self._by_label("everstep_signature_matches_total", "signature")
        return NodeReading(
            node=node,
            host=self._host(),
            gpus=self._gpus(),
            ranks=self._ranks(),
            sources=self._by_label("everstep_source_last_success_timestamp_seconds", "source"),
            signature_matches={name: int(count) for name, count in matches.items()},
        )

    def _by_label(self, name: str, label: str) -> dict[str, float]:
        return {
            s.labels[label]: s.value for s in self._samples if s.name == name and label in s.labels
        }

    def _absent(self) -> NotMeasured:
        return NotMeasured(why="not on the page", source=self._source, at=self._at)

    def _host(self) -> Observation[HostReading]:
        found = {s.name: s.value for s in self._samples if s.name.startswith("everstep_node_")}
        try:
            reading = HostReading(
                load1=found["everstep_node_load1"],
                memory_total_bytes=int(found["everstep_node_memory_total_bytes"]),
                memory_available_bytes=int(found["everstep_node_memory_available_bytes"]),
            )
        except KeyError:
            return self._absent()
        return Ok(value=reading, source=self._source, at=self._at)

    def _ranks(self) -> tuple[RankSample, ...]:
        step = self._by_label("everstep_rank_step", "rank")
        age = self._by_label("everstep_rank_heartbeat_age_seconds", "rank")
        phase = {
            s.labels["rank"]: s.labels.get("phase", "")
            for s in self._samples
            if s.name == "everstep_rank_phase" and s.value == 1 and "rank" in s.labels
        }
        ranks = sorted({r for r in map(_index, (*step, *age, *phase)) if r is not None})
        return tuple(
            RankSample(
                rank=rank,
                step=int(step[str(rank)]) if str(rank) in step else None,
                phase=phase.get(str(rank), ""),
                heartbeat_age_s=age.get(str(rank)),
            )
            for rank in ranks
        )

    def _gpus(self) -> tuple[GpuReading, ...]:
        fields: dict[tuple[int, str], dict[str, float]] = {}
        silent = set()
        for sample in self._samples:
            known = GPU_FIELDS.get(sample.name)
            is_answer = sample.name == "everstep_gpu_answers"
            index = _index(sample.labels.get("gpu", ""))
            if not (known or is_answer) or index is None:
                continue
            key = (index, sample.labels.get("uuid") or sample.labels.get("UUID") or "")
            values = fields.setdefault(key, {})
            if known:
                values[known.field] = sample.value * known.factor
            elif sample.value == 0:
                silent.add(key)
        return tuple(self._gpu(key, fields[key], key in silent) for key in sorted(fields))

    def _gpu(self, key: tuple[int, str], values: Mapping[str, float], silent: bool) -> GpuReading:
        def get(name: str) -> Observation[float]:
            if name in values:
                return Ok(value=values[name], source=self._source, at=self._at)
            if silent:
                return Unknown(why="the GPU does not answer", source=self._source, at=self._at)
            return self._absent()

        return GpuReading(
            index=key[0],
            uuid=key[1],
            busy_ratio=get("busy_ratio"),
            memory_used_bytes=get("memory_used_bytes"),
            memory_total_bytes=get("memory_total_bytes"),
            power_watts=get("power_watts"),
            temperature_celsius=get("temperature_celsius"),
        )


def _is_value(sample: Sample) -> bool:
    """Tell a number from a NaN and from what DCGM writes for "blank"."""
    if not math.isfinite(sample.value):
        return False
    is_dcgm = sample.name.startswith("DCGM_")
    return not is_dcgm or (sample.value < BLANK_FROM and sample.value not in BLANK_INT32)


def _index(label: str) -> int | None:
    """Return a label as a number, None for what cannot be one of ours."""
    return int(label) if label.isdecimal() and len(label) <= 9 else None


def _get(url: str, timeout_s: float) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("not an http address")
    deadline = time.monotonic() + timeout_s
    kind = client.HTTPSConnection if parts.scheme == "https" else client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    path = (parts.path or "/metrics") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.connect()
        # The connection forgets its socket when the answer will be the last one on it.
        wire = connection.sock
        with _ended_at(deadline, wire):
            connection.request("GET", path, headers={"Accept": "text/plain"})
            response = connection.getresponse()
        # The answer is closed by itself: it may own the socket that the connection forgot.
        with response:
            wire.settimeout(_left_s(deadline))
            if response.status != client.OK:
                raise ValueError(f"answered {response.status} {response.reason}")
            body = bytearray()
            while chunk := response.read1(_CHUNK):
                body += chunk
                if len(body) > MAX_BYTES:
                    raise ValueError(f"answered more than {MAX_BYTES} bytes")
                wire.settimeout(_left_s(deadline))
            return body.decode("utf-8", "replace")
    finally:
        connection.close()


@contextmanager
def _ended_at(deadline: float, wire: socket.socket) -> Iterator[None]:
    """Shut the connection down at the deadline: a timeout bounds one byte, not all headers."""

    def end() -> None:
        with suppress(OSError):
            wire.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left_s(deadline), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _left_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the answer did not end in time")
    return left
