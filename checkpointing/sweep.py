"""Finds and deletes what never became a checkpoint: data without a manifest, open uploads."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from checkpointing import keys
from checkpointing.resolver import Catalogue, CommitInfo, read_catalogue, usable
from checkpointing.store.base import ObjectInfo, ObjectStore, OpenUpload

OLDER_THAN_S: Final = 86_400.0
Place = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """The objects of one attempt at one step that no manifest names.

    Attributes:
        place: Step and attempt.
        objects: All of them, each old enough.
        why: One line.
    """

    place: Place
    objects: tuple[ObjectInfo, ...]
    why: str

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(info.nbytes for info in self.objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What a sweep deletes."""

    orphans: tuple[Orphan, ...]
    uploads: tuple[OpenUpload, ...]


def plan_sweep(
    data: Iterable[ObjectInfo],
    uploads: Iterable[OpenUpload],
    known: Collection[Place],
    newest: CommitInfo | None,
    now: float,
    older_than_s: float = OLDER_THAN_S,
) -> SweepPlan:
    """Decide what is an orphan. Pure.

    Never: what a manifest or a deletion's note has, sound or not; anything of a step after the
    newest commit or created after it; anything younger than `older_than_s` or of unknown age.
    Without a sound commit nothing is an orphan.

    Args:
        data: Objects below the run's data.
        uploads: Open uploads there.
        known: (step, attempt) of all manifests and notes.
        newest: The newest sound commit.
        now: Unix seconds.
        older_than_s: Age that everything of an orphan must have.
    """
    if newest is None or newest.committed_at is None:
        return SweepPlan(orphans=(), uploads=())
    before = min(now - older_than_s, newest.committed_at)
    groups: dict[Place, list[ObjectInfo]] = defaultdict(list)
    for info in data:
        if (place := keys.place_of_data(info.key)) is not None:
            groups[place].append(info)
    orphans = []
    for place, objects in sorted(groups.items()):
        if place in known or place[0] > newest.step:
            continue
        if all(info.modified_at is not None and info.modified_at < before for info in objects):
            days = (now - max(info.modified_at or 0.0 for info in objects)) / 86_400
            why = f"never committed, {days:.1f} days old"
            orphans.append(Orphan(place=place, objects=tuple(objects), why=why))
    stale = [
        upload
        for upload in uploads
        if (place := keys.place_of_data(upload.key)) is not None
        and place[0] <= newest.step
        and upload.started_at < before
    ]
    return SweepPlan(orphans=tuple(orphans), uploads=tuple(stale))


def find_orphans(
    store: ObjectStore,
    run: str,
    now: float,
    *,
    older_than_s: float = OLDER_THAN_S,
    in_use: Collection[Place] = (),
) -> SweepPlan:
    """Look for orphans of a run; deletes nothing.

    Raises:
        StoreError: The store could not be asked.
    """
    prefix = keys.data_root(run)
    # The data first: what is committed while this looks is then seen as committed.
    data = store.list(prefix)
    uploads = store.open_uploads(prefix)
    catalogue = read_catalogue(store, run)
    newest = next((commit for commit, _ in usable(store, catalogue)), None)
    known = {*in_use, *_known(store, run, catalogue, data)}
    return plan_sweep(data, uploads, known, newest, now, older_than_s)


def sweep(store: ObjectStore, run: str, plan: SweepPlan) -> int:
    """Delete what a plan says and is still not committed; return the bytes.

    Raises:
        StoreError: The store could not do it; find orphans again.
    """
    freed = 0
    for orphan in plan.orphans:
        if _is_committed(store, run, orphan.place):
            continue
        # Indexes last: what is left of an interrupted sweep is still seen to be an attempt's.
        for info in sorted(orphan.objects, key=lambda info: info.key.endswith(".json")):
            if info.key.startswith(keys.data_root(run)):
                store.delete(info.key)
        freed += orphan.nbytes
    for upload in plan.uploads:
        if upload.key.startswith(keys.data_root(run)):
            store.abort_upload(upload)
    return freed


def _known(
    store: ObjectStore, run: str, catalogue: Catalogue, data: Sequence[ObjectInfo]
) -> Iterator[Place]:
    yield from (commit.place for commit in (*catalogue.commits, *catalogue.quarantined))
    for info in store.list(keys.deleting_prefix(run)):
        if (place := keys.place_of_deletion(info.key)) is not None:
            yield place
    # An old manifest that cannot be read may be that of any attempt at its step.
    doubtful = {old[0] for key in catalogue.unreadable if (old := keys.place_of_manifest(key))}
    for info in data:
        if (place := keys.place_of_data(info.key)) is not None and place[0] in doubtful:
            yield place


def _is_committed(store: ObjectStore, run: str, place: Place) -> bool:
    return store.head(keys.manifest_key(run, *place)) is not None
