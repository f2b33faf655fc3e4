"""What the supervisor can do to the world; each action is carried out once per key."""

from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """Where the ranks of an attempt get their state from: the furthest place that one needs."""

    MEMORY = "memory"  # all of them of their own node
    PEER = "peer"  # another node
    DISK = "disk"
    STORE = "store"

    @property
    def words(self) -> str:
        """It for a person."""
        return {
            Source.MEMORY: "the nodes' memory",
            Source.PEER: "the nodes' memory and copies in it",
            Source.DISK: "the nodes' disks",
            Source.STORE: "the store",
        }[self]


class Outcome(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A copy to be brought to a rank's node, of the first that gives it whole.

    Attributes:
        nodes: Nodes in whose memory it lies.
        disks: Nodes on whose disk it lies; they are asked behind the others.
    """

    rank: int
    nodes: tuple[str, ...] = ()
    disks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The checkpoint that an attempt starts from: written at `step` by `attempt`.

    Attributes:
        fetches: What has to be brought to the nodes before their ranks start.
    """

    step: int
    attempt: int
    source: Source
    fetches: tuple[Fetch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Ask the launcher for one allocation of `nodes` nodes, spares included, without `exclude`."""

    nodes: int
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unhold:
    """Let an allocation try again that is held after a failed launch, without `exclude`."""

    job: str
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """End an allocation that the run has no more use for."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteNode:
    """Write an incident into the ledger of nodes that all runs share.

    Attributes:
        incident: Its number in this run.
        excluded_s: For how long no run may use the node, 0 when it may.
    """

    node: str
    incident: int
    fault: str
    cause: str
    excluded_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRanks:
    """Start `ranks_per_node` ranks on each of `nodes`; ranks are numbered in that order."""

    attempt: int
    nodes: tuple[str, ...]
    ranks_per_node: int
    restore: Restore | None
    interval_steps: int
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRanks:
    """Stop an attempt on `nodes`; a planned stop lets the ranks save and leave first.

    Attributes:
        moved: The next attempt is to run on other nodes, and which fault that counts as; "" when
            it is not known yet that there will be one.
    """

    attempt: int
    nodes: tuple[str, ...]
    planned: bool = False
    moved: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Write the manifest of a checkpoint whose shards are all in the store."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Have a checkpoint never be restored again, by no run; `found_by` is an attempt."""

    step: int
    attempt: int
    why: str
    found_by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Delete committed checkpoints, given as (step, attempt), oldest first."""

    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetInterval:
    """Save every `interval_steps` from `effective_step` on; the rest is why, for the reader."""

    attempt: int
    interval_steps: int
    effective_step: int
    previous_steps: int
    goodput: float
    binding: str
    inputs: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Tell nodes where their buddies take copies of what they stage; the others know it."""

    attempt: int
    buddies: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Save once at `step`, outside the interval."""

    attempt: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Do nothing, and say what is being waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the run: stop the agents, give the allocation back, page when it failed."""

    outcome: Outcome


Action = (
    Launch
    | Unhold
    | GiveBack
    | NoteNode
    | StartRanks
    | StopRanks
    | Commit
    | Quarantine
    | Prune
    | SetInterval
    | Pair
    | Snapshot
    | Wait
    | Finish
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One action with its reason.

    Attributes:
        key: Idempotency key `run/attempt/kind/n`, unique in a journal; the same key is never
            carried out twice.
        rule: The rule that matched.
        reason: One sentence for a person.
        evidence: Sequence numbers of the journal records that it rests on, oldest first.
    """

    key: str
    rule: str
    action: Action
    reason: str
    evidence: tuple[int, ...] = ()


def kind_of(action: Action) -> str:
    """Name an action as keys and tables do, e.g. `StartRanks` as `start_ranks`."""
    name = type(action).__name__
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
