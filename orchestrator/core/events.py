"""What can happen to a run: facts as they enter the journal.

A fact says what a source saw, never what to do about it. Verdicts (`FaultJudged`) carry their
evidence. Times inside events are ages in seconds measured by the source, so that clocks of
different nodes are never compared. Those of checkpoints are defined next door and belong here.
"""

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.actions import Decision
from orchestrator.core.checkpoint_events import (
    DISK,
    PEER,
    CatalogueRead,
    CatalogueUnknown,
    CheckpointCommitted,
    CommitRefused,
    FolderStep,
    FolderWatched,
    QuarantineRead,
    Replica,
    Replicated,
    RetentionPlanned,
    ShardUploaded,
    Staged,
    StagedShard,
    UploadFailed,
)
from orchestrator.core.policy import Policy

__all__ = [
    "DISK",
    "PEER",
    "ActionDone",
    "AgentJoined",
    "AgentLost",
    "AgentWarned",
    "CatalogueRead",
    "CatalogueUnknown",
    "CheckpointCommitted",
    "CommitRefused",
    "DecisionMade",
    "Ending",
    "Event",
    "FaultJudged",
    "FolderStep",
    "FolderWatched",
    "JobObserved",
    "LeaseTaken",
    "LedgerRead",
    "NodeLeaving",
    "OperatorSaid",
    "PhaseReached",
    "PolicySet",
    "Progress",
    "QuarantineRead",
    "RankExited",
    "RankOverdue",
    "RanksGone",
    "RanksStarted",
    "Replica",
    "Replicated",
    "RetentionPlanned",
    "RunRequested",
    "ShardUploaded",
    "SignatureSeen",
    "Staged",
    "StagedShard",
    "UploadFailed",
]


class Ending(StrEnum):
    """How an allocation ended, as far as its launcher can tell."""

    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    FAILED = "failed"
    COMPLETED = "completed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequested:
    """The run exists; always the first record.

    Attributes:
        checkpoints: Whether there is a store; without one nothing is committed or restored.
        attempts_before: Attempts in earlier journals of this run; numbers go on from there.
        committed_before: Newest step that those had committed, 0 for none.
        on_disks_before: What was whole on disks last, as (step, attempt), by those journals.
    """

    run: str
    nodes: int
    spares: int
    ranks_per_node: int
    interval_steps: int
    checkpoints: bool
    attempts_before: int = 0
    committed_before: int = 0
    on_disks_before: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySet:
    """The limits in force from here on (written again when the run's file changed)."""

    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTaken:
    """A supervisor became the only writer; the first record of its epoch."""

    epoch: int
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSaid:
    """A person asked for `stop` or `snapshot`."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJoined:
    """An agent connected, for the first time or again.

    A new `incarnation` says that no rank of an earlier one runs on this node any more; the earlier
    one never counts again. An agent that was declared lost is taken back once it says that it has
    no ranks: until then its node stays lost, since its attempt went on, or ended, without it.

    Attributes:
        attempt: The attempt that its ranks belong to, 0 for none.
        job: The allocation that the node belongs to, "" when that is not known.
        unfit: Why no rank can run there, as the agent found by looking, "" when nothing is wrong.
        replicas: What the node keeps of copies.
        replica_address: Where it takes and gives them, "" for nowhere.
    """

    node: str
    incarnation: str
    address: str
    metrics_url: str
    attempt: int = 0
    staged: tuple[StagedShard, ...] = ()
    job: str = ""
    unfit: str = ""
    replicas: tuple[Replica, ...] = ()
    replica_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWarned:
    """An agent was told by a signal that its allocation will end: `USR2` or `TERM`.

    USR2 comes a while before the time limit. TERM comes with the end itself (time limit,
    preemption, scancel): what is left is the launcher's grace.

    Attributes:
        left_s: Seconds until the agent ends its ranks and leaves by itself; inf when it does not.
    """

    node: str
    signal: str
    left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeaving:
    """The site wants a node back, and why; "" when it does not want it back any more."""

    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRead:
    """What the ledger of nodes says now; replaces what was known of it.

    Attributes:
        excluded: Nodes that no run may use, and why.
        excluded_lately: Nodes that runs excluded by themselves inside the breaker's window.
    """

    excluded: dict[str, str]
    excluded_lately: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """An agent is gone for good or has been silent too long."""

    node: str
    incarnation: str
    why: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobObserved:
    """An allocation changed: `state` is `queued`, `held`, `running` or `gone`."""

    job: str
    state: str
    why: str = ""
    ending: Ending | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStarted:
    """An agent started its ranks of an attempt."""

    attempt: int
    node: str
    ranks: tuple[int, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksGone:
    """An agent was told to stop an attempt: no rank of it runs there, and none will be started.

    Comes after the `RankExited` of each rank that had been started; the only word on ranks that
    never were, because the order to start them got lost.
    """

    attempt: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank ended. `ours` is true when the agent had been told to stop it.

    Attributes:
        code: Exit code, or minus the signal's number.
        note: `restore_failed`, `checkpoint_damaged`, `store_away` or `stage_refused` for the exit
            codes that mean that.
        age_s: Seconds between the exit and this report, on the agent's clock.
        last_line: Last line of output, at most 300 characters.
    """

    attempt: int
    node: str
    rank: int
    code: int
    ours: bool
    note: str = ""
    age_s: float = 0.0
    last_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOverdue:
    """A rank has stayed in a phase longer than the phase may last.

    Attributes:
        for_s: Seconds beyond the phase's bound.
        why: What is abnormal about this process alone (`process is stopped`), "" when nothing is.
    """

    attempt: int
    node: str
    rank: int
    phase: str
    step: int
    for_s: float
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureSeen:
    """A known failure text appeared in a rank's output (first time in this attempt)."""

    attempt: int
    node: str
    rank: int
    signature: str
    fault: str
    secondary: bool
    confidence: float
    culprit_node: str
    culprit_rank: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReached:
    """All ranks of the attempt have reached `restore`, `step` or `first_step`."""

    attempt: int
    phase: str
    step: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the slowest and fastest rank are; nan in a measurement means not measured."""

    attempt: int
    min_step: int
    max_step: int
    loss: float
    step_s: float
    stall_s: float
    saves: int
    skipped_saves: int
    tokens: int
    dropped_saves: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultJudged:
    """What ended an attempt, and who is to blame (None: unknown)."""

    attempt: int
    fault: str
    fault_class: str
    node: str | None
    rank: int | None
    confidence: float
    cause: str
    evidence: tuple[int, ...]
    discounted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMade:
    """The intent, written before its effect."""

    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionDone:
    """The effect of a decision is known to have happened, or to have failed."""

    key: str
    ok: bool
    detail: str = ""


Event = (
    RunRequested
    | PolicySet
    | LeaseTaken
    | OperatorSaid
    | CatalogueRead
    | QuarantineRead
    | RetentionPlanned
    | CatalogueUnknown
    | AgentJoined
    | AgentLost
    | AgentWarned
    | NodeLeaving
    | LedgerRead
    | JobObserved
    | RanksStarted
    | RanksGone
    | RankExited
    | RankOverdue
    | SignatureSeen
    | PhaseReached
    | Progress
    | Staged
    | Replicated
    | ShardUploaded
    | UploadFailed
    | CheckpointCommitted
    | CommitRefused
    | FolderWatched
    | FaultJudged
    | DecisionMade
    | ActionDone
)
