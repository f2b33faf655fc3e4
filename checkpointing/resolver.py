"""Which checkpoints of a run are committed."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from checkpointing import keys
from checkpointing.errors import ManifestInvalid, ObjectMissing
from checkpointing.manifest import read_manifest
from checkpointing.store.base import ObjectStore

_THREADS: Final = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """A committed checkpoint: finished steps, the attempt that staged it, its manifest's key."""

    step: int
    attempt: int
    key: str


def list_commits(store: ObjectStore, run: str) -> tuple[CommitInfo, ...]:
    """Return the commits of a run, newest first; a manifest that fails its CRC is none.

    Raises:
        StoreError: The store could not be asked. This is never reported as "no commits".
    """
    found = [
        (step, info.key)
        for info in store.list(keys.commits_prefix(run))
        if (step := keys.step_of_manifest(info.key)) is not None
    ]

    def describe(item: tuple[int, str]) -> CommitInfo | None:
        step, key = item
        try:
            return CommitInfo(step=step, attempt=read_manifest(store, key).attempt, key=key)
        except ManifestInvalid as error:
            _log.warning("not a usable commit: %s", error)
        except ObjectMissing:
            _log.info("%s was deleted meanwhile", key)
        return None

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="resolve") as pool:
        described = list(pool.map(describe, sorted(found, reverse=True)))
    return tuple(commit for commit in described if commit is not None)
