"""What is known of one node and of one allocation; both are parts of the state."""

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.events import Ending, Replica, StagedShard


class AllocationPhase(StrEnum):
    """The life of one allocation."""

    ASKED = "asked"
    QUEUED = "queued"
    HELD = "held"
    RUNNING = "running"
    REFUSED = "refused"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One allocation, from the decision to ask for it until it is gone.

    Attributes:
        key: Of the decision that asked for it; also known to the launcher.
        job: The launcher's id for it, "" until it has one.
        seq: The record that changed it last.
        given_at: When it got its nodes, None before.
        came: Agents of all its nodes have joined.
        over_at: When it was refused, given back first or seen to be gone.
        spared: It had all its nodes and ended while an attempt trained without them.
        unheld: How often it was let go after a failed launch.
        unheld_at: When that was decided last.
        given_back_at: When the run itself decided last to end it.
    """

    key: str
    nodes: int
    asked_at: float
    seq: int
    exclude: tuple[str, ...] = ()
    job: str = ""
    phase: AllocationPhase = AllocationPhase.ASKED
    why: str = ""
    ending: Ending | None = None
    given_at: float | None = None
    came: bool = False
    over_at: float | None = None
    spared: bool = False
    unheld: int = 0
    unheld_at: float | None = None
    given_back_at: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has no nodes and never will again."""
        return self.phase in (AllocationPhase.REFUSED, AllocationPhase.GONE)

    @property
    def given_back(self) -> bool:
        """Whether the run itself ended it."""
        return self.given_back_at is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it is still to get its nodes."""
        return self.phase in (
            AllocationPhase.ASKED,
            AllocationPhase.QUEUED,
            AllocationPhase.HELD,
        )

    @property
    def had_nodes(self) -> bool:
        """Whether it ever got as far as to have nodes."""
        return self.came or self.given_at is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An agent's node.

    Attributes:
        unfit: What its agent found wrong with it, empty for nothing.
        excluded: Why it gets no ranks any more, empty if it may.
        lost_at: When it was declared lost last, None when it never was.
        in_ledger: The ledger says so too, so that it can also take it back.
        leaving: Why the site wants it back, empty if it does not; it still works.
        warned: The signal that announced its end, `USR2` or `TERM`, "" for none.
        warned_at: When that was heard.
        given_back: The run ends its allocation.
        former: Replaced incarnations; nothing that they say counts.
        replicas: Copies of snapshots, of other nodes in its memory and of its own on its disk.
        replica_address: Where it takes and gives them, "" for nowhere.
        copy_problem: Why its snapshots are not copied elsewhere, "" for nothing.
        shelf: Copies on its disk as it told last; they stay there while it is lost.
    """

    name: str
    incarnation: str
    alive: bool
    address: str
    metrics_url: str
    joined_seq: int
    lost_why: str = ""
    lost_at: float | None = None
    job: str = ""
    unfit: str = ""
    excluded: str = ""
    in_ledger: bool = False
    leaving: str = ""
    warned: str = ""
    warned_at: float = 0.0
    given_back: bool = False
    former: frozenset[str] = frozenset()
    staged: tuple[StagedShard, ...] = ()
    replicas: tuple[Replica, ...] = ()
    replica_address: str = ""
    copy_problem: str = ""
    shelf: tuple[Replica, ...] = ()

    @property
    def complaint(self) -> str:
        """What speaks against it though it lives, empty for nothing."""
        return self.excluded or self.unfit or self.leaving

    @property
    def is_usable(self) -> bool:
        """Whether it may get ranks."""
        is_barred = self.unfit or self.excluded or self.warned or self.given_back
        return self.alive and not is_barred

    @property
    def is_good(self) -> bool:
        """Whether it may get ranks and is there to stay."""
        return self.is_usable and not self.leaving
