"""Commits of watched entries: written last and once, and read back."""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from checkpointing.checksum import crc64
from checkpointing.errors import (
    CommitRefused,
    ManifestInvalid,
    ObjectConflict,
    ObjectCorrupt,
    ObjectMissing,
)
from checkpointing.store.base import ObjectStore
from checkpointing.watched import names
from checkpointing.watched.documents import Commit, Part, PartRef, read_document

_TRIES: Final = 16
_Version = tuple[int, str, float | None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A commit and its place.

    Attributes:
        version: Counts from 1; an entry that a trainer wrote anew has several.
        commit: What it says.
        at: When it was made, in Unix seconds by the store's clock; None when not known.
    """

    version: int
    commit: Commit
    at: float | None = None

    @property
    def age_s(self) -> float | None:
        """Seconds since then by this machine's clock; None when not known."""
        return None if self.at is None else max(0.0, time.time() - self.at)


def newest(store: ObjectStore, prefix: str, entry: str) -> Committed | None:
    """Return the newest sound commit of an entry, None when there is none.

    Raises:
        StoreError: The store could not be asked.
    """
    return _sound(store, sorted(_versions(store, prefix, entry), reverse=True))


def at_version(store: ObjectStore, prefix: str, entry: str, version: int) -> Committed | None:
    """Return one commit of an entry, None when it is not there or spoilt."""
    key = names.commit_key(prefix, entry, version)
    return _sound(store, [(version, key, None)])


def all_newest(store: ObjectStore, prefix: str) -> tuple[Committed, ...]:
    """Return the newest sound commit of each entry, oldest entry first.

    Raises:
        StoreError: The store could not be asked.
    """
    by_entry: dict[str, list[_Version]] = {}
    for info in store.list(names.commits_prefix(prefix)):
        if (place := names.version_of_key(info.key)) is not None:
            by_entry.setdefault(place[0], []).append((place[1], info.key, info.modified_at))
    found = [_sound(store, sorted(versions, reverse=True)) for versions in by_entry.values()]
    sound = [committed for committed in found if committed is not None]
    return tuple(sorted(sound, key=lambda one: names.age(one.commit.entry)))


def _versions(store: ObjectStore, prefix: str, entry: str) -> Iterator[_Version]:
    for info in store.list(names.commits_prefix(prefix, entry)):
        if (place := names.version_of_key(info.key)) is not None:
            yield place[1], info.key, info.modified_at


def _sound(store: ObjectStore, versions: Iterable[_Version]) -> Committed | None:
    for version, key, at in versions:
        try:
            commit = Commit.unpack(read_document(store, key))
        except (ManifestInvalid, ObjectCorrupt) as error:
            _log.warning("%s: spoilt, the one before it counts: %s", key, error)
            continue
        except ObjectMissing:
            continue  # deleted meanwhile
        return Committed(version=version, commit=commit, at=at)
    return None


def read_part(store: ObjectStore, prefix: str, commit: Commit, ref: PartRef) -> Part:
    """Read a part that a commit names.

    Raises:
        ManifestInvalid: It is spoilt.
        ObjectConflict: It is another one.
        StoreError: The store could not be asked, or has none.
    """
    key = names.part_key(prefix, commit.entry, commit.attempt, ref.node, ref.number, ref.crc64)
    packed = read_document(store, key)
    part = Part.unpack(packed)
    same = (part.entry, part.node, part.attempt) == (commit.entry, ref.node, commit.attempt)
    if crc64(packed) != ref.crc64 or not same:
        raise ObjectConflict(f"{key}: is not the part that was committed")
    return part


def put_part(store: ObjectStore, prefix: str, part: Part) -> PartRef:
    """Store a node's part; doing it again changes nothing.

    Raises:
        StoreError: The store could not take it.
    """
    packed = part.pack()
    crc = crc64(packed)
    own = [
        (number, sum_)
        for node, number, sum_ in _parts(store, prefix, part.entry, part.attempt)
        if node == names.quoted(part.node)
    ]
    number, last = max(own, default=(0, -1))
    if last != crc:
        number += 1
        key = names.part_key(prefix, part.entry, part.attempt, part.node, number, crc)
        if not store.put_if_absent(key, packed) and store.get(key) != packed:
            raise ObjectConflict(f"{key}: has other content")
    return PartRef(node=part.node, number=number, crc64=crc)


def gather(
    store: ObjectStore, prefix: str, part: Part, own: PartRef, nodes: int
) -> tuple[Commit | None, int]:
    """Return what can be committed, and how many nodes have stored their part.

    Args:
        store: Where the parts are.
        prefix: What they are kept under.
        part: This node's.
        own: Names it.
        nodes: How many are expected.
    """
    if nodes == 1:
        refs = {names.quoted(part.node): own}
        nbytes = part.nbytes
    else:
        latest: dict[str, tuple[int, int]] = {}
        for node, number, crc in _parts(store, prefix, part.entry, part.attempt):
            latest[node] = max(latest.get(node, (0, 0)), (number, crc))
        if len(latest) != nodes:
            return None, len(latest)
        refs, nbytes = {}, 0
        for node, (number, crc) in latest.items():
            place = names.parts_prefix(prefix, part.entry, part.attempt)
            other = Part.unpack(read_document(store, f"{place}{node}/{number:06d}-{crc:016x}.json"))
            refs[node] = PartRef(node=other.node, number=number, crc64=crc)
            nbytes += other.nbytes
    parts = tuple(refs[node] for node in sorted(refs))
    return Commit(entry=part.entry, attempt=part.attempt, nbytes=nbytes, parts=parts), len(refs)


def commit(store: ObjectStore, prefix: str, wanted: Commit) -> Committed:
    """Commit, unless the newest commit says the same.

    Raises:
        CommitRefused: A later attempt has committed this entry.
        StoreError: The store could not do it; do it again.
    """
    for _ in range(_TRIES):
        versions = sorted(_versions(store, prefix, wanted.entry), reverse=True)
        found = _sound(store, versions)
        if found is not None and found.commit == wanted:
            return found
        if found is not None and found.commit.attempt > wanted.attempt:
            raise CommitRefused(
                f"{wanted.entry}: attempt {found.commit.attempt} has committed it, "
                f"this is of attempt {wanted.attempt}"
            )
        version = versions[0][0] + 1 if versions else 1
        key = names.commit_key(prefix, wanted.entry, version)
        if store.put_if_absent(key, wanted.pack()):
            return Committed(version=version, commit=wanted)
    raise CommitRefused(f"{wanted.entry}: others commit it all the time")


def _parts(
    store: ObjectStore, prefix: str, entry: str, attempt: int
) -> Iterator[tuple[str, int, int]]:
    for info in store.list(names.parts_prefix(prefix, entry, attempt)):
        if (place := names.part_of_key(info.key)) is not None:
            yield place
