"""What is known of a run, as one immutable value; `fold` makes the next one from an event."""

from dataclasses import dataclass, field
from enum import StrEnum

from orchestrator.core.actions import Action, Outcome, Restore
from orchestrator.core.events import FaultJudged, RunRequested, ShardUploaded
from orchestrator.core.folders import Folders
from orchestrator.core.measured import FailedCommit, Measured
from orchestrator.core.node import Allocation, Node
from orchestrator.core.policy import Policy
from orchestrator.core.saves import SaveCost

Place = tuple[int, int]
"""A checkpoint: step and attempt."""


class RunPhase(StrEnum):
    """Where the run is, for people and for the rules."""

    REQUESTED = "requested"
    ALLOCATING = "allocating"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    RECOVERING = "recovering"
    FINISHING = "finishing"
    OVER = "over"


class AttemptPhase(StrEnum):
    """The life of one attempt: one start of all ranks."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """One piece of evidence about the end of an attempt, in journal order."""

    seq: int
    at: float
    kind: str
    node: str
    rank: int | None = None
    code: int = 0
    ours: bool = False
    note: str = ""
    signature: str = ""
    fault: str = ""
    secondary: bool = False
    confidence: float = 0.0
    culprit_node: str = ""
    culprit_rank: int | None = None
    text: str = ""
    for_s: float = 0.0
    phase: str = ""
    step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of all ranks, from the order to start until the last rank is gone.

    Attributes:
        nodes: Placement in rank order; rank r runs on nodes[r // ranks_per_node].
        exits: Exit code per rank, for ranks known to have ended.
        lost: Nodes of the placement that are gone together with their ranks.
        clear: Nodes whose agent said that it has no ranks of this attempt left.
        stop_orders: How often the attempt was told to stop.
        moved: The fault that its planned stop counts as (see `StopRanks.moved`), "" for none.
        moved_why: The reason of that stop.
        moved_seq: The record that ordered it.
        first_trouble: The clue that ended the healthy part, None while healthy.
        min_step: Last step that all ranks finished; -1 before the first.
        buddies: For each node that was told, where its buddy takes copies.
        unpaired_at: When some could not be told last, 0 for never.
    """

    number: int
    nodes: tuple[str, ...]
    ranks_per_node: int
    restore: Restore | None
    phase: AttemptPhase
    ordered_at: float
    ordered_seq: int
    started_nodes: frozenset[str] = frozenset()
    started_at: float | None = None
    restoring_at: float | None = None
    stepping_at: float | None = None
    first_step_at: float | None = None
    exits: dict[int, int] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    clear: frozenset[str] = frozenset()
    clues: tuple[Clue, ...] = ()
    first_trouble: Clue | None = None
    trouble_since: float = 0.0
    stop_ordered_at: float | None = None
    stop_orders: int = 0
    planned_stop: bool = False
    moved: str = ""
    moved_why: str = ""
    moved_seq: int = 0
    over_at: float | None = None
    min_step: int = -1
    max_step: int = -1
    verdict: FaultJudged | None = None
    verdict_seq: int = 0
    buddies: dict[str, str] = field(default_factory=dict)
    unpaired_at: float = 0.0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.nodes) * self.ranks_per_node

    def node_of(self, rank: int) -> str:
        """Name of the node that `rank` runs on."""
        return self.nodes[rank // self.ranks_per_node]

    @property
    def is_live(self) -> bool:
        """Whether any of its ranks may still be running."""
        return self.phase is not AttemptPhase.OVER

    @property
    def manned(self) -> tuple[str, ...]:
        """Nodes that may still have ranks of this attempt, in rank order."""
        return tuple(n for n in self.nodes if n not in self.lost and n not in self.clear)

    @property
    def is_finished(self) -> bool:
        """Whether every rank left with code 0 by itself.

        A rank that we stopped may leave with 0 as well (it handles SIGTERM): that is no end.
        """
        if self.is_live or self.stop_ordered_at is not None or len(self.exits) < self.world:
            return False
        return not any(self.exits.values())

    @property
    def needs_verdict(self) -> bool:
        """Whether it is over, neither finished nor stopped for good, and not judged yet."""
        if self.is_live or self.verdict is not None:
            return False
        return bool(self.moved) or not (self.planned_stop or self.is_finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One interruption, from the fault to the first new step. Times are Unix seconds.

    Attributes:
        fault_at: When the fault happened, as far as its first witness can tell.
        step: Last step that all ranks had finished when it happened.
        resumed_step: Step of the checkpoint that the next attempt started from.
        best_step: Furthest step of the run up to the incident.
        forgiven: A later checkpoint was committed beyond `best_step`.
    """

    number: int
    attempt: int
    fault: str
    fault_class: str
    node: str | None
    rank: int | None
    cause: str
    fault_at: float
    detected_at: float
    stopped_at: float
    step: int
    best_step: int
    evidence: tuple[int, ...]
    decision: str = ""
    rule: str = ""
    next_attempt: int | None = None
    restore: Restore | None = None
    resumed_step: int | None = None
    started_at: float | None = None
    restoring_at: float | None = None
    stepping_at: float | None = None
    first_step_at: float | None = None
    forgiven: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An action that was decided and whose outcome is not known yet."""

    key: str
    action: Action
    seq: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that the rules look at."""

    run: RunRequested | None = None
    policy: Policy = field(default_factory=lambda: Policy(budget={}))
    phase: RunPhase = RunPhase.REQUESTED
    seq: int = 0
    at: float = 0.0
    requested_at: float = 0.0
    epoch: int = 0
    lease_at: float = 0.0
    allocations: tuple[Allocation, ...] = ()
    ledger: dict[str, str] = field(default_factory=dict)
    excluded_lately: int = 0
    noted: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    attempt: Attempt | None = None
    last_attempt: int = 0
    committed_before: int = 0
    incidents: tuple[Incident, ...] = ()
    catalogue_read: bool = False
    catalogue_problem: str = ""
    commits: tuple[tuple[int, int], ...] = ()
    on_disks: Place | None = None
    quarantined: frozenset[tuple[int, int, str]] = frozenset()
    in_quarantine: frozenset[Place] = frozenset()
    unkept: tuple[Place, ...] = ()
    deleted: int = 0
    retention_problem: str = ""
    uploads: dict[tuple[int, int], dict[int, ShardUploaded]] = field(default_factory=dict)
    failed_commits: dict[tuple[int, int], FailedCommit] = field(default_factory=dict)
    refused: frozenset[tuple[int, int]] = frozenset()
    refused_why: str = ""
    last_upload_error: str = ""
    interval_steps: int = 0
    interval_changed_step: int = -1
    best_step: int = -1
    loss: float = float("nan")
    tokens: int = 0
    saves: int = 0
    skipped_saves: int = 0
    dropped_saves: int = 0
    committed_at: float = 0.0
    last_save: SaveCost | None = None
    folders: Folders = field(default_factory=Folders)
    measured: Measured = field(default_factory=Measured)
    stop_requested_seq: int = 0
    snapshot_requested_seq: int = 0
    snapshots_done_seq: int = 0
    pending: dict[str, Pending] = field(default_factory=dict)
    seen: dict[str, tuple[str, int]] = field(default_factory=dict)
    waiting_for: str = ""
    outcome: Outcome | None = None
    outcome_reason: str = ""
    over: bool = False

    def is_fenced(self, node: str, incarnation: str) -> bool:
        """Whether this agent was replaced by a later one of its node."""
        known = self.nodes.get(node)
        return known is not None and incarnation in known.former

    def is_current(self, node: str, incarnation: str) -> bool:
        """Whether this agent counts as the living one of its node.

        One that just said hello and does not has been declared lost or replaced meanwhile.
        """
        known = self.nodes.get(node)
        return known is not None and known.alive and known.incarnation == incarnation

    @property
    def living_allocations(self) -> tuple[Allocation, ...]:
        """The allocations that have nodes or wait for them."""
        return tuple(a for a in self.allocations if not a.is_over)

    def is_being_ended(self, allocation: Allocation) -> bool:
        """Whether Slurm ends an allocation: SIGTERM reached every agent that it still has.

        One agent alone may have been told by anybody.
        """
        own = [n for n in self.nodes.values() if n.job and n.job == allocation.job]
        is_told = any(n.warned == "TERM" for n in own)
        return is_told and not any(n.alive and n.warned != "TERM" for n in own)

    def members(self, allocation: Allocation) -> tuple[str, ...]:
        """Return the nodes whose agents, living or lost, belong to an allocation.

        Agents that do not say where they belong count for the first one.
        """
        is_first = allocation == self.allocations[0]
        return tuple(
            node.name
            for node in self.nodes.values()
            if node.job == allocation.job or (is_first and not node.job)
        )

    def waited_s(self, since: float, now: float) -> float:
        """Return for how long somebody has been here to see that something did not come.

        Answers wait at the agents while no supervisor runs, so that time does not count.
        """
        return now - max(since, self.lease_at)
