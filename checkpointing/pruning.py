"""What retention would delete from a store, and the deletion."""

import logging
import time
from collections.abc import Callable, Collection, Sequence

from checkpointing.deletion import delete_commit, finish_deletions
from checkpointing.errors import ManifestInvalid, ObjectMissing
from checkpointing.manifest import read_manifest
from checkpointing.resolver import Catalogue, CommitInfo, list_commits, read_catalogue
from checkpointing.retention import (
    Candidate,
    Place,
    RetentionPlan,
    RetentionPolicy,
    plan_retention,
)
from checkpointing.store.base import ObjectStore

TokensOf = Callable[[CommitInfo], int | None]
_log = logging.getLogger(__name__)


class Tokens:
    """The tokens that manifests tell, each read once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: dict[str, int | None] = {}

    def of(self, commit: CommitInfo) -> int | None:
        """Return what was trained until a commit, None when its manifest does not say.

        Raises:
            StoreError: The store could not be asked.
        """
        if commit.key not in self._known:
            try:
                self._known[commit.key] = read_manifest(self._store, commit.key).tokens
            except (ManifestInvalid, ObjectMissing):
                return None
        return self._known[commit.key]


def plan_for(
    store: ObjectStore,
    run: str,
    policy: RetentionPolicy,
    *,
    tokens_of: TokensOf | None = None,
    in_use: Collection[Place] = (),
    shunned: Collection[Place] = (),
    now: float | None = None,
) -> RetentionPlan:
    """Decide what becomes of each commit of a run; changes nothing.

    A commit whose manifest was found to be unreadable is left alone: what it names is not known.

    Args:
        store: Holds them.
        run: Name of the run.
        policy: What to keep.
        tokens_of: Tells the tokens of a commit; None for what its manifest says.
        in_use: Never deleted.
        shunned: Not restored any more, although the store does not know of it yet.
        now: Unix seconds, None for those of this machine.

    Raises:
        StoreError: The store could not be asked.
    """
    sound = {commit.place for commit in list_commits(store, run)}
    catalogue = read_catalogue(store, run)
    tokens = tokens_of or Tokens(store).of
    is_asked = policy.average_every_tokens > 0

    def candidate(commit: CommitInfo, quarantined: bool) -> Candidate:
        return Candidate(
            step=commit.step,
            attempt=commit.attempt,
            committed_at=commit.committed_at,
            tokens=tokens(commit) if is_asked else None,
            quarantined=quarantined or commit.place in shunned,
        )

    found = [candidate(c, quarantined=False) for c in catalogue.commits if c.place in sound]
    found += [candidate(c, quarantined=True) for c in catalogue.quarantined]
    return plan_retention(found, time.time() if now is None else now, policy, in_use)


def readable(store: ObjectStore, catalogue: Catalogue, places: Collection[Place]) -> list[Place]:
    """Return those whose manifests say what to delete, oldest first."""
    found = []
    for commit in sorted((*catalogue.commits, *catalogue.quarantined), key=lambda c: c.place):
        if commit.place not in places:
            continue
        try:
            read_manifest(store, commit.key)
        except (ManifestInvalid, ObjectMissing) as error:
            _log.info("stays, since what it names is not known: %s", error)
        else:
            found.append(commit.place)
    return found


def delete_all(
    store: ObjectStore,
    run: str,
    places: Sequence[Place],
    may_go_on: Callable[[], bool] = lambda: True,
) -> tuple[int, int]:
    """Finish interrupted deletions, then delete these; return how many, and bytes of data.

    Doing it again finishes what was interrupted.

    Args:
        store: Holds them.
        run: Name of the run.
        places: Oldest first.
        may_go_on: Asked before each.

    Raises:
        ManifestInvalid: One cannot be read, so what it names is not known.
        StoreError: The store could not do it.
    """
    done = freed = 0
    finish_deletions(store, run)
    for place in places:
        if not may_go_on():
            break
        freed += delete_commit(store, run, *place)
        done += 1
    return done, freed
