"""What is told of checkpoints: staged, copied, uploaded, committed, refused, deleted."""

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.saves import SaveCost, ShardCost

PEER, DISK = "peer", "disk"  # the tiers of a `Replica`


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueRead:
    """The store's committed checkpoints as (step, attempt), newest first.

    Attributes:
        commits: Those that may be restored.
        quarantined: Those that may not.
    """

    commits: tuple[tuple[int, int], ...]
    quarantined: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRead:
    """Checkpoints that somebody else has put into quarantine since, as (step, attempt)."""

    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlanned:
    """Commits in the store that no rule of the run's file keeps, as (step, attempt), oldest first.

    Attributes:
        problem: Why it is not known, "" when it is.
    """

    places: tuple[tuple[int, int], ...]
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueUnknown:
    """The store could not be listed: never the same as an empty store."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedShard:
    """A complete snapshot of one rank in its node's memory.

    Attributes:
        world: Number of ranks of its attempt, 0 when not known.
        for_store: Whether it goes to the store as well.
    """

    rank: int
    step: int
    attempt: int
    world: int = 0
    for_store: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A sealed copy of one rank's snapshot that a node keeps: in memory as `peer`, or on `disk`."""

    tier: str
    rank: int
    step: int
    attempt: int
    world: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The complete snapshots in a node's memory now; replaces what was known of the node."""

    node: str
    shards: tuple[StagedShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """What a node keeps of copies now, and where; replaces what was known of the node.

    Attributes:
        problem: Why copying from it fails, "" since a copy came through again.
    """

    node: str
    address: str
    replicas: tuple[Replica, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUploaded:
    """One rank's part of a checkpoint is in the store, with its index.

    Attributes:
        upload_s: From the step boundary until then; nan when the uploader did not see it begin.
        cost: What it cost; left out of the journal, which has the sum with the commit.
    """

    attempt: int
    step: int
    rank: int
    world: int
    index_key: str
    index_crc64: int
    nbytes: int
    upload_s: float
    cost: ShardCost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFailed:
    """One rank's part could not be stored; training goes on."""

    attempt: int
    step: int
    rank: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The manifest is in the store: this checkpoint can be restored from now on.

    Attributes:
        cost: What it cost until here, None when nobody knows.
    """

    step: int
    attempt: int
    manifest_key: str
    nbytes: int
    cost: SaveCost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRefused:
    """The shards do not make a whole checkpoint; `why` names tensor and ranks."""

    step: int
    attempt: int
    why: str


class FolderStep(StrEnum):
    """What can become of a folder that a trainer wrote by itself.

    `KNOWN` was committed before its watcher began; `REMOVED` is gone from the disk.
    """

    UPLOADED = "uploaded"
    COMMITTED = "committed"
    KNOWN = "known"
    FAILED = "failed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderWatched:
    """What became of a folder that a node watches.

    Attributes:
        entry: Its name, "" for the watched directory as a whole.
        version: Of its commit, 0 before.
        upload_s: How long the upload took; nan when there was none.
        age_s: How long ago it was committed; nan when not known.
        why: Why it failed; it is tried again.
    """

    node: str
    entry: str
    step: FolderStep
    version: int = 0
    nbytes: int = 0
    upload_s: float = float("nan")
    age_s: float = 0.0
    why: str = ""
