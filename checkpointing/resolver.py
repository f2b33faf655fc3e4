"""Which checkpoints of a run are committed, and which of those may be used."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from checkpointing import keys
from checkpointing.errors import ManifestInvalid, NothingUsable, ObjectMissing
from checkpointing.manifest import Manifest, read_manifest
from checkpointing.store.base import ObjectInfo, ObjectStore

VERIFIED: Final = 2
"""As many of the newest are read before a list is given: the newest and its fallback."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """A committed checkpoint, as its key tells it.

    Attributes:
        step: Finished steps.
        attempt: Attempt that staged it.
        key: Key of its manifest.
        committed_at: When it was committed, in Unix seconds by the store's clock, if that tells.
    """

    step: int
    attempt: int
    key: str
    committed_at: float | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Step and attempt, by which commits are ordered."""
        return self.step, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """What the keys of a run say.

    Attributes:
        commits: May be used, as far as is known without reading them; newest first.
        quarantined: Committed, but failed to restore once; newest first.
        unreadable: Keys of manifests that cannot be read, found on the way.
    """

    commits: tuple[CommitInfo, ...]
    quarantined: tuple[CommitInfo, ...]
    unreadable: tuple[str, ...]


def read_catalogue(store: ObjectStore, run: str) -> Catalogue:
    """List a run's commits without reading them; only those with an old key are read.

    Raises:
        StoreError: The store could not be asked. This is never reported as "no commits".
    """
    found: dict[tuple[int, int], CommitInfo] = {}
    unreadable = []
    for info in store.list(keys.commits_prefix(run)):
        try:
            commit = _described(store, info)
        except ManifestInvalid as error:
            unreadable.append(info.key)
            _log.warning("not a usable commit: %s", error)
            continue
        if commit is not None and len(commit.key) >= len(
            found.get(commit.place, commit).key
        ):  # the longer key is the one with the attempt
            found[commit.place] = commit
    # Listed later than the commits: what was quarantined meanwhile is known as such.
    spoilt = {
        place
        for info in store.list(keys.quarantine_prefix(run))
        if (place := keys.place_of_quarantine(info.key)) is not None
    }
    ordered = [found[place] for place in sorted(found, reverse=True)]
    return Catalogue(
        commits=tuple(c for c in ordered if c.place not in spoilt),
        quarantined=tuple(c for c in ordered if c.place in spoilt),
        unreadable=tuple(unreadable),
    )


def usable(store: ObjectStore, catalogue: Catalogue) -> Iterator[tuple[CommitInfo, Manifest]]:
    """Yield the commits whose manifests are sound, newest first, each read when it is asked for.

    Raises:
        StoreError: The store could not be asked.
    """
    for commit in catalogue.commits:
        try:
            manifest = read_manifest(store, commit.key)
        except ManifestInvalid as error:
            _log.warning("not a usable commit: %s", error)
        except ObjectMissing:
            _log.info("%s was deleted meanwhile", commit.key)
        else:
            if manifest.average_of and not keys.is_average(manifest.run):
                _log.warning("not a usable commit: %s is an average", commit.key)
                continue
            yield commit, manifest


def list_commits(
    store: ObjectStore, run: str, *, verified: int = VERIFIED
) -> tuple[CommitInfo, ...]:
    """Return the commits of a run that may be used, newest first.

    Only the newest `verified` sound ones are read, and what is newer and not sound is left out.
    Older ones are given as their keys tell: who restores one reads it, and may find it spoilt.
    Quarantined ones are left out, which is logged.

    Raises:
        NothingUsable: There are commits, and none can be used. That is no fresh run either.
        StoreError: The store could not be asked. This is never reported as "no commits".
    """
    catalogue = read_catalogue(store, run)
    for commit in catalogue.quarantined:
        _log.info("step %d of attempt %d is in quarantine: left out", *commit.place)
    sound: list[CommitInfo] = []
    for commit, _ in usable(store, catalogue):
        sound.append(commit)
        if len(sound) >= verified:
            break
    if not sound and (catalogue.quarantined or catalogue.commits or catalogue.unreadable):
        raise NothingUsable(
            f"{run}: no usable checkpoint, but {len(catalogue.quarantined)} in quarantine and "
            f"{len(catalogue.commits) + len(catalogue.unreadable)} that cannot be read; "
            "see `everstep checkpoints ls`"
        )
    if len(sound) < verified:
        return tuple(sound)
    older = (c for c in catalogue.commits if c.place < sound[-1].place)
    return (*sound, *older)


def find_commit(store: ObjectStore, run: str, step: int, attempt: int | None = None) -> CommitInfo:
    """Return the commit of a step: of the attempt asked for, else the newest usable one.

    Raises:
        ObjectMissing: There is none; quarantined ones are found only by their attempt.
        StoreError: The store could not be asked.
    """
    catalogue = read_catalogue(store, run)
    candidates = (
        catalogue.commits if attempt is None else (*catalogue.commits, *catalogue.quarantined)
    )
    for commit in candidates:
        if commit.step == step and attempt in (None, commit.attempt):
            return commit
    wanted = f"step {step}" if attempt is None else f"step {step} of attempt {attempt}"
    hint = ""
    if attempt is None and any(commit.step == step for commit in catalogue.quarantined):
        hint = " outside quarantine"
    raise ObjectMissing(f"{run}: {wanted} is not committed{hint}")


def _described(store: ObjectStore, info: ObjectInfo) -> CommitInfo | None:
    place = keys.place_of_manifest(info.key)
    if place is None:
        return None
    step, attempt = place
    if attempt is None:
        try:
            attempt = read_manifest(store, info.key).attempt
        except ObjectMissing:
            _log.info("%s was deleted meanwhile", info.key)
            return None
    return CommitInfo(step=step, attempt=attempt, key=info.key, committed_at=info.modified_at)
