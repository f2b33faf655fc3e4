"""Everything that checkpointing can raise.

CheckpointingError
|-- StoreError
|   |-- StoreUnavailable            no answer, or a 5xx: retried, then raised
|   |   `-- StoreThrottled          the store asked for fewer requests
|   |-- StoreDenied                 credentials or permissions
|   |-- StoreMissing                the bucket or the folder does not exist
|   |-- NothingUsable               there are commits, and none of them can be used
|   |-- ObjectMissing               the store answers, the key does not exist
|   |-- ObjectConflict              the key exists with other content
|   |-- ObjectCorrupt               size or CRC is not what was promised
|   `-- ConditionalPutUnsupported   the store ignores If-None-Match
|-- StageError
|   |-- StageRefused                not enough memory, found out before step 1
|   |-- StageBusy                   both slots are still needed
|   `-- ArenaInvalid                the file is not an arena that this version can read
|-- ReplicaError                    a copy to or from another node or a disk did not succeed
|   `-- ReplicaCorrupt              what came is not what was promised
|-- SlotInvalid                     the file is not a slot that this version can read
|-- ManifestInvalid                 a manifest or an index fails its own check
|-- CommitRefused                   the parts of a checkpoint do not fit together
`-- RestoreFailed                   the wanted checkpoint cannot be restored, bit for bit
    `-- CheckpointDamaged           what the store holds of it is not what was committed
"""

from typing import Final

RESTORE_FAILED_EXIT: Final = 77
"""Exit code of a rank that was told to restore and could not."""

CHECKPOINT_DAMAGED_EXIT: Final = 79
"""The same, where what the store holds of the checkpoint is not what was committed."""

STORE_AWAY_EXIT: Final = 80
"""The same, where the store stayed away for as long as a rank may wait for it."""

STAGE_REFUSED_EXIT: Final = 78
"""Exit code of a rank whose state does not fit into the memory for staging."""


class CheckpointingError(Exception):
    """Root of the tree above."""


class StoreError(CheckpointingError):
    """A store could not do what was asked.

    Attributes:
        code: The store's own word for it ("SlowDown"), or the kind of silence ("ReadTimeoutError").
    """

    code: str = ""


class StoreUnavailable(StoreError):
    """The store gave no usable answer; asking again later may help."""


class StoreThrottled(StoreUnavailable):
    """The store asked for fewer requests."""


class StoreDenied(StoreError):
    """The store refused these credentials or this action."""


class StoreMissing(StoreError):
    """The bucket or folder that holds the store does not exist."""


STORE_AWAY: Final = (StoreUnavailable, StoreDenied, StoreMissing)
"""What tells of the store alone, and nothing of what it holds."""


class NothingUsable(StoreError):
    """A run has commits, and all are spoilt or in quarantine: a person has to look."""


class ObjectMissing(StoreError):
    """The store is there, the object is not."""


class ObjectConflict(StoreError):
    """The key is taken by other content. Nothing is ever overwritten."""


class ObjectCorrupt(StoreError):
    """An object's size or CRC differs from what was promised."""


class ConditionalPutUnsupported(StoreError):
    """The store accepts a second `If-None-Match: *` put of one key."""


class StageError(CheckpointingError):
    """A state could not be copied into the arena."""


class StageRefused(StageError):
    """The arena does not fit into the memory that is left."""


class StageBusy(StageError):
    """No slot is free: the upload of the previous save is not done."""


class ArenaInvalid(StageError):
    """The file is not an arena of this format."""


class ReplicaError(CheckpointingError):
    """A snapshot could not be copied to or from another node or a disk."""


class ReplicaCorrupt(ReplicaError):
    """A snapshot, or what describes it, is not what was promised."""


class SlotInvalid(CheckpointingError):
    """The file is not a slot of this format."""


class ManifestInvalid(CheckpointingError):
    """A manifest or an index does not pass its own check."""


class CommitRefused(CheckpointingError):
    """The uploads do not add up to one consistent checkpoint."""


class RestoreFailed(CheckpointingError):
    """The wanted checkpoint cannot be restored exactly."""


class CheckpointDamaged(RestoreFailed):
    """What the store holds of a committed checkpoint is not what was committed."""
