"""The values that a node exports, as one immutable picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from monitors.gpu.readings import GpuReading
from monitors.host import HostReading
from monitors.observations import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """A rank that lives now. Dead ranks have no sample.

    Attributes:
        rank: Global rank.
        step: Last finished step; None when it has not finished or told any.
        phase: What it is doing; "" when it does not tell.
        heartbeat_age_s: Seconds since its last sign of life; None when there was none.
    """

    rank: int
    step: int | None = None
    phase: str = ""
    heartbeat_age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """Everything a node tells at one scrape.

    Attributes:
        run: Name of the run, the same over all attempts.
        node: Name of the node.
        attempt: Number of the attempt; appears on the info metric alone.
        ranks: Living ranks of this node.
        host: Load and memory.
        gpus: GPUs of this node; () when there is no driver.
        log_lines: Lines read since the agent started.
        signature_matches: How often each known line was seen, by id.
        copy_failures: How often copying a snapshot failed, by tier.
        sources: Unix seconds of the last good answer of each source.
    """

    run: str
    node: str
    attempt: int = 0
    ranks: tuple[RankSample, ...] = ()
    host: Observation[HostReading]
    gpus: tuple[GpuReading, ...] = ()
    log_lines: int = 0
    signature_matches: Mapping[str, int] = field(default_factory=dict)
    copy_failures: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, float] = field(default_factory=dict)
