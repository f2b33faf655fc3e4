"""Deletes a committed checkpoint: its manifest first, then exactly what that names.

What is to be deleted is noted before anything is, so that whoever comes next can finish a deletion
that was interrupted at any point. A note whose manifest still exists is one of a deletion that had
not begun: it is dropped, and retention decides again.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from checkpointing import keys
from checkpointing.errors import ManifestInvalid, ObjectMissing
from checkpointing.manifest import Manifest, read_manifest
from checkpointing.sealed import fetch
from checkpointing.store.base import ObjectStore

_THREADS: Final = 8
_log = logging.getLogger(__name__)


def delete_commit(store: ObjectStore, run: str, step: int, attempt: int) -> int:
    """Delete a commit, its indexes and its data; return the bytes of the data.

    Doing it again after it was interrupted finishes it; a commit that is not there is none.

    Raises:
        ManifestInvalid: Its manifest cannot be read, so what it names is not known.
        StoreError: The store could not do it; do it again.
    """
    own, old = keys.manifest_key(run, step, attempt), keys.old_manifest_key(run, step)
    found = {
        key: manifest
        for key in (own, old)
        if (manifest := _manifest(store, key, attempt)) is not None
    }
    if not found:
        return _finish(store, run, step, attempt)
    note = keys.deleting_key(run, step, attempt)
    packed = next(iter(found.values())).pack()
    if not store.put_if_absent(note, packed) and not _holds(store, note, packed):
        store.delete(note)  # of an earlier checkpoint of the same name, or spoilt
        store.put_if_absent(note, packed)
    for key in found:
        store.delete(key)
    # Whoever finished deletions meanwhile may have taken it for one that had not begun.
    store.put_if_absent(note, packed)
    return _finish(store, run, step, attempt)


def finish_deletions(store: ObjectStore, run: str) -> tuple[tuple[int, int], ...]:
    """Finish what was interrupted; return (step, attempt) of what was.

    Raises:
        StoreError: The store could not do it; do it again.
    """
    done = []
    for info in store.list(keys.deleting_prefix(run)):
        place = keys.place_of_deletion(info.key)
        if place is None:
            continue
        if any(_exists(store, run, *place)):
            store.delete(info.key)  # it had not begun
            continue
        try:
            _finish(store, run, *place)
        except ManifestInvalid as error:
            _log.warning("an interrupted deletion stays: %s", error)
            continue
        done.append(place)
    return tuple(done)


def named_keys(manifest: Manifest) -> Sequence[str]:
    """Return the keys of everything that a manifest names."""
    found = [shard.data_key for shard in manifest.shards if shard.data_key]
    return [*found, *(shard.index_key for shard in manifest.shards)]


def _finish(store: ObjectStore, run: str, step: int, attempt: int) -> int:
    note = keys.deleting_key(run, step, attempt)
    try:
        manifest = fetch(store, note, Manifest.unpack)
    except ObjectMissing:
        return 0
    if (manifest.run, manifest.step, manifest.attempt) != (run, step, attempt):
        raise ManifestInvalid(f"{note}: is of another checkpoint")
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="delete") as pool:
        list(pool.map(store.delete, named_keys(manifest)))
    store.delete(note)
    return manifest.nbytes


def _holds(store: ObjectStore, key: str, content: bytes) -> bool:
    try:
        return store.get(key) == content
    except ObjectMissing:
        return False


def _manifest(store: ObjectStore, key: str, attempt: int) -> Manifest | None:
    try:
        found = read_manifest(store, key)
    except ObjectMissing:
        return None
    return found if found.attempt == attempt else None


def _exists(store: ObjectStore, run: str, step: int, attempt: int) -> list[bool]:
    own, old = keys.manifest_key(run, step, attempt), keys.old_manifest_key(run, step)
    return [store.head(own) is not None, _manifest(store, old, attempt) is not None]
