"""What can go wrong, what it counts against, and who is to blame.

Standard library only and pure: the deciding core of the orchestrator imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class FaultKind(StrEnum):
    """The root of an incident, one word each.

    `gpu_memory` is a hardware memory error (ECC). A program that asks for more device memory than
    there is crashed: `rank_crashed`. `rank_killed` is a signal from outside the program. `moved` is
    no fault: the run left nodes of its own accord. `node_full` is a node without room for a
    checkpoint that had found room before. `store_away` is a store that did not answer a restore:
    of the checkpoint it says nothing. `allocation_ended` is what `preempted` and
    `time_limit` are while it is not known which.
    """

    RANK_KILLED = "rank_killed"
    RANK_CRASHED = "rank_crashed"
    USER_ERROR = "user_error"
    HANG = "hang"
    NODE_LOST = "node_lost"
    GPU = "gpu"
    GPU_MEMORY = "gpu_memory"
    NETWORK = "network"
    HOST_OOM = "host_oom"
    NODE_FULL = "node_full"
    STORAGE = "storage"
    STORE_AWAY = "store_away"
    RESTORE_FAILED = "restore_failed"
    MOVED = "moved"
    ALLOCATION_ENDED = "allocation_ended"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    UNKNOWN = "unknown"


class FaultClass(StrEnum):
    """What an incident is charged to.

    `process`, `node` and `storage` each have a restart budget of their own. `user` is not retried:
    the same code meets the same error. `free` costs nothing, since nothing failed.
    """

    PROCESS = "process"
    NODE = "node"
    STORAGE = "storage"
    USER = "user"
    FREE = "free"


CLASS_OF: Mapping[FaultKind, FaultClass] = MappingProxyType(
    {
        FaultKind.RANK_KILLED: FaultClass.PROCESS,
        FaultKind.RANK_CRASHED: FaultClass.PROCESS,
        FaultKind.USER_ERROR: FaultClass.USER,
        FaultKind.HANG: FaultClass.PROCESS,
        FaultKind.NODE_LOST: FaultClass.NODE,
        FaultKind.GPU: FaultClass.NODE,
        FaultKind.GPU_MEMORY: FaultClass.NODE,
        FaultKind.NETWORK: FaultClass.NODE,
        FaultKind.HOST_OOM: FaultClass.PROCESS,
        FaultKind.NODE_FULL: FaultClass.NODE,
        FaultKind.STORAGE: FaultClass.STORAGE,
        FaultKind.STORE_AWAY: FaultClass.STORAGE,
        FaultKind.RESTORE_FAILED: FaultClass.STORAGE,
        FaultKind.MOVED: FaultClass.FREE,
        FaultKind.ALLOCATION_ENDED: FaultClass.FREE,
        FaultKind.PREEMPTED: FaultClass.FREE,
        FaultKind.TIME_LIMIT: FaultClass.FREE,
        FaultKind.UNKNOWN: FaultClass.PROCESS,
    }
)


class EvidenceKind(StrEnum):
    """The ways in which a fault shows itself."""

    EXIT = "exit"
    OVERDUE = "overdue"
    SIGNATURE = "signature"
    NODE_LOST = "node_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One thing that was seen. Which of the later fields count depends on `kind`.

    Attributes:
        seq: Number of the event that carries it; unique within one judgement.
        at: Unix seconds; nodes' clocks may differ by some milliseconds.
        kind: What was seen.
        node: Where it was seen: the reporter, not the culprit.
        rank: Rank that exited, is overdue or wrote the line; None for kernel and Slurm lines.
        code: exit: the exit code; None when a signal ended the process.
        signal: exit: number of the signal that ended the process, else None.
        ours: exit: we stopped this process ourselves; it then tells nothing about the fault.
        step: Last finished step that the rank had reported; None when it reported none.
        phase: overdue: what the rank was doing; exit: the same, when it is known.
        for_s: overdue: seconds beyond what the phase allows.
        signature: signature: id in the signature table.
        fault: signature: the fault it points at.
        secondary: signature: a consequence of somebody else's fault, never a root by itself.
        confidence: signature: 0..1, how surely the line means this fault.
        text: signature: the line itself, bounded; exit: last words of the process, if any.
        culprit_node: signature: node that the line blames, "" when it blames none.
        culprit_rank: signature: rank that the line blames, None when it blames none.
        why: node_lost: what says so (`Slurm: DOWN`, `agent silent for 30 s`); overdue: what is
            abnormal about this process alone (`stopped`), "" when nothing is.
    """

    seq: int
    at: float
    kind: EvidenceKind
    node: str = ""
    rank: int | None = None
    code: int | None = None
    signal: int | None = None
    ours: bool = False
    step: int | None = None
    phase: str = ""
    for_s: float = 0.0
    signature: str = ""
    fault: FaultKind = FaultKind.UNKNOWN
    secondary: bool = False
    confidence: float = 0.5
    text: str = ""
    culprit_node: str = ""
    culprit_rank: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who or what is to blame for an incident, and on what grounds.

    Attributes:
        fault: The root. `unknown` when nothing tells.
        node: Culprit node; None when no node is to blame or none can be named.
        rank: Culprit rank; None when no rank is to blame or none can be named.
        confidence: 0..1.
        cause: One line for a person.
        evidence: Numbers of the events that led to the verdict, rising.
        discounted: Evidence that was seen but not followed, one line each, with the reason.
    """

    fault: FaultKind
    node: str | None = None
    rank: int | None = None
    confidence: float = 0.0
    cause: str
    evidence: tuple[int, ...] = ()
    discounted: tuple[str, ...] = ()

    @property
    def fault_class(self) -> FaultClass:
        """What the incident is charged to."""
        return CLASS_OF[self.fault]
