"""What agent and supervisor say to each other: JSON text frames over one WebSocket.

The agent opens the connection and says `Hello`; the supervisor answers `Welcome`. From then on
the agent sends `Report` (lossy, the latest counts) and `Fact` (kept and sent again until `Ack`);
the supervisor sends `Order`, answered by `Outcome`. An order carries the supervisor's epoch: an
agent refuses one that is older than the newest it has seen.
"""

import json
from dataclasses import dataclass
from typing import cast

from orchestrator.core.actions import Restore
from orchestrator.core.codec import CodecError, decode, encode
from orchestrator.core.events import (
    AgentWarned,
    FolderWatched,
    RankExited,
    RanksGone,
    RanksStarted,
    Replica,
    Replicated,
    ShardUploaded,
    SignatureSeen,
    Staged,
    StagedShard,
    UploadFailed,
)

MAX_FRAME_BYTES = 4 * 1024 * 1024
FactEvent = (
    RanksStarted
    | RanksGone
    | RankExited
    | SignatureSeen
    | Staged
    | Replicated
    | ShardUploaded
    | UploadFailed
    | FolderWatched
    | AgentWarned
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An agent introduces itself.

    `attempt` is the one its ranks belong to, 0 for none; `job` the allocation, "" when unknown;
    `unfit` why no rank can run there, "" when nothing is wrong; `replicas` the copies of snapshots
    that the node keeps and `replica_address` where it takes and gives them, "" for nowhere.
    """

    node: str
    incarnation: str
    pid: int
    address: str
    metrics_url: str
    attempt: int
    staged: tuple[StagedShard, ...]
    job: str = ""
    unfit: str = ""
    replicas: tuple[Replica, ...] = ()
    replica_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The supervisor's answer.

    Attributes:
        epoch: The supervisor's epoch.
        acked: Facts up to this number of this incarnation are in the journal.
        attempt: The live attempt that this node belongs to, 0 for none: ranks of any other
            attempt must end at once.
    """

    epoch: int
    acked: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's heartbeat, with its times as ages; nan means none or no bound.

    `abnormal` says what is wrong with an overdue process by itself, "" when nothing is.
    """

    rank: int
    step: int
    phase: str
    phase_age_s: float
    allowed_s: float
    loss: float
    step_s: float
    stall_s: float
    saves: int
    skipped_saves: int
    tokens: int
    dropped_saves: int = 0
    abnormal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The heartbeats of a node's ranks; ranks that wrote none are left out."""

    attempt: int
    ranks: tuple[RankReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something for the journal; `n` counts up within one incarnation."""

    n: int
    event: FactEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Facts up to `n` are on disk."""

    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePort:
    """Choose a port for the attempt's rendezvous; the outcome's detail is the port."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartNode:
    """Start this node's ranks of an attempt."""

    attempt: int
    node_rank: int
    num_nodes: int
    ranks: int
    master_addr: str
    master_port: int
    restore: Restore | None
    interval_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopNode:
    """Stop this node's ranks; planned: let them save at `stop_step` and leave first."""

    attempt: int
    planned: bool
    stop_step: int
    save_s: float
    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Change what the ranks read at their next step boundary; -1 leaves a value alone."""

    attempt: int
    interval_steps: int = -1
    effective_step: int = -1
    snapshot_step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedRank:
    """One rank's copy to bring: `sources` are addresses in the order of trying, or `disk`."""

    rank: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchNode:
    """Bring copies of a checkpoint into this node's memory, before the attempt's ranks start.

    A rank whose copy cannot be had within `timeout_s` counts as one whose restore failed.
    """

    attempt: int
    step: int
    saved_by: int
    world: int
    ranks: tuple[FetchedRank, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Buddy:
    """Copy what this node's ranks stage to this address from now on."""

    attempt: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Stop everything on the node, free its memory, leave."""

    grace_s: float


OrderBody = ReservePort | StartNode | StopNode | Control | FetchNode | Buddy | Shutdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One thing to do, once: an agent answers a key it knows with the outcome it had."""

    key: str
    epoch: int
    body: OrderBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an order."""

    key: str
    ok: bool
    detail: str = ""


FromAgent = Hello | Report | Fact | Outcome
FromSupervisor = Welcome | Ack | Order


def pack(message: FromAgent | FromSupervisor) -> str:
    """Render a message as one text frame."""
    return json.dumps(encode(message), separators=(",", ":"), allow_nan=False)


def unpack_from_agent(text: str) -> FromAgent:
    """Parse what an agent sent; raises CodecError for anything else."""
    return cast(FromAgent, _unpack(text, FromAgent))


def unpack_from_supervisor(text: str) -> FromSupervisor:
    """Parse what a supervisor sent; raises CodecError for anything else."""
    return cast(FromSupervisor, _unpack(text, FromSupervisor))


def _unpack(text: str, kind: object) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"message: not JSON: {error}") from error
    return decode(value, kind)
