"""What is known of the folders that a trainer writes by itself and the nodes watch."""

import math
from dataclasses import dataclass, replace

from orchestrator.core.events import FolderStep, FolderWatched


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """The last commit, the last failure, and counts; times are Unix seconds.

    Attributes:
        entry: The folder that was committed last, "" for none.
        committed_at: When; None when not known.
        failure: Why a folder could not be kept last, "" for never.
        failed_entry: Which, "" for the watched directory as a whole.
        failures: How often one could not.
        removed: Folders deleted from disks once they were committed.
    """

    entry: str = ""
    version: int = 0
    nbytes: int = 0
    committed_at: float | None = None
    failure: str = ""
    failed_entry: str = ""
    failed_at: float = 0.0
    failures: int = 0
    removed: int = 0


def watched(folders: Folders, event: FolderWatched, at: float) -> Folders:
    """Return what is known after an event."""
    match event.step:
        case FolderStep.COMMITTED | FolderStep.KNOWN:
            return _committed(folders, event, at)
        case FolderStep.FAILED:
            return replace(
                folders,
                failure=event.why,
                failed_entry=event.entry,
                failed_at=at,
                failures=folders.failures + 1,
            )
        case FolderStep.REMOVED:
            return replace(folders, removed=folders.removed + 1)
        case FolderStep.UPLOADED:
            return folders


def _committed(folders: Folders, event: FolderWatched, at: float) -> Folders:
    """A watcher that begins tells of older commits too: the one made last counts."""
    made_at = None if math.isnan(event.age_s) else at - event.age_s
    if folders.entry and (made_at is None or made_at < (folders.committed_at or 0.0)):
        return folders
    return replace(
        folders,
        entry=event.entry,
        version=event.version,
        nbytes=event.nbytes,
        committed_at=made_at,
    )
