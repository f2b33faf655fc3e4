"""A folder of replicas: what is in it is whole, and known to be; the newest two of each rank."""

import fcntl
import logging
import os
import secrets
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

from checkpointing.checksum import crc64
from checkpointing.durable import fsync_folder
from checkpointing.errors import ArenaInvalid, CheckpointingError, ReplicaError
from checkpointing.replicas.replica import Name, Offer, outdated
from checkpointing.replicas.room import Room, Share
from checkpointing.replicas.snapshot import SnapshotFile, Source
from checkpointing.replicas.spares import Spares, set_aside
from checkpointing.replicas.taking import take

_COMING: Final = ".coming-"
_SPARE: Final = ".spare-"
_log = logging.getLogger(__name__)


class Shelf:
    """The replicas in one folder, which no other process writes to.

    Args:
        folder: An existing one.
        room: How much may be written there.
        durable: A replica outlives a power failure from the moment that it counts.
    """

    def __init__(self, folder: Path, room: Room, *, durable: bool = False) -> None:
        self._folder = folder
        self._room = room
        self._durable = durable
        self._lock = threading.Lock()
        self._spares = Spares()
        if not durable:
            room.when_short(self._spares.drop)
        for prefix in (_COMING, _SPARE):  # of a killed one
            for path in folder.glob(f"{prefix}*"):
                path.unlink(missing_ok=True)
        self._held: dict[Name, Offer] = {}
        for path in sorted(folder.glob("*.replica")):
            if (offer := _read(path)) is not None:
                self._held[offer.name] = offer
        self.tidy()

    def held(self) -> tuple[Offer, ...]:
        """Return what is there, newest first."""
        with self._lock:
            self._ensure_folder()
            return tuple(self._held[name] for name in sorted(self._held, reverse=True))

    def needs(self, name: Name) -> bool:
        """Tell whether a snapshot would be kept, and is not there yet."""
        with self._lock:
            self._ensure_folder()
            return name not in self._held and name not in outdated((*self._held, name))

    def open(self, name: Name) -> SnapshotFile:
        """Open a replica for reading; it stays readable when it is dropped meanwhile.

        Raises:
            ReplicaError: It is not there, or is no longer what it was.
        """
        with self._lock:
            offer = self._held.get(name)
            if offer is None:
                raise ReplicaError(f"no replica of {label(name)} here")
            try:
                snapshot = SnapshotFile(self._folder / name.file, in_memory=not self._durable)
                if not self._durable:
                    fcntl.flock(snapshot.file, fcntl.LOCK_SH)  # nobody may write it over
            except (ArenaInvalid, OSError) as error:
                self._forget(name)
                raise ReplicaError(f"the replica of {label(name)} is gone: {error}") from error
        with suppress(ArenaInvalid):
            if snapshot.offer(0) == offer:
                return snapshot
        snapshot.close()
        with self._lock:
            self._forget(name)
        raise ReplicaError(f"the replica of {label(name)} is spoilt")

    def room_for(self, offer: Offer) -> Share:
        """Take room for a snapshot, before any of its bytes come.

        Of a rank's two replicas the older one goes when memory is short, the only one never.

        Raises:
            ReplicaError: There is not enough, with the numbers.
        """
        with self._lock:
            if (spare := self._spares.take(offer.capacities.file_nbytes)) is not None:
                return Share(self._room, 0, spare)
            try:
                return self._room.share(offer.total)
            except ReplicaError as error:
                older = self._older_of_two(offer.name.rank)
                if older is None:
                    raise ReplicaError(f"no room for {label(offer.name)}: {error}") from error
            self._drop(older)
            return self._room.share(offer.total)

    def keep(self, offer: Offer, source: Source, share: Share) -> None:
        """Take a snapshot in, into the room that was taken for it; `tidy` after that.

        Raises:
            ReplicaError: What came is not what was offered, or broke off.
            OSError: It broke off, or could not be written.
        """
        path = self._hidden(_COMING)
        view = share.spare.view if share.spare is not None else None
        try:
            if share.spare is not None:
                share.spare.path.replace(path)
            with FileIO(path, "x+" if view is None else "r+") as file:
                take(offer, source, file, share, view)
                if self._durable:
                    os.fsync(file.fileno())
            path.replace(self._folder / offer.name.file)
            if self._durable:
                fsync_folder(self._folder)
            with self._lock:
                self._held[offer.name] = offer
        finally:
            path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Drop what is no longer needed; its memory is kept for what comes next."""
        with self._lock:
            gone = outdated(self._held)
            most = len({name.rank for name in self._held})
            aside = [found for name in gone if (found := self._set_aside(name)) is not None]
        for path in aside:
            self._spares.add(path, most)

    def drop_idle(self) -> None:
        """Give back memory that was kept and has not been needed for a while."""
        self._spares.drop_idle()

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            for name in tuple(self._held):
                self._drop(name)
        self._spares.drop()

    def _hidden(self, prefix: str) -> Path:
        return self._folder / f"{prefix}{secrets.token_hex(8)}"

    def _ensure_folder(self) -> None:
        """Begin anew when somebody has deleted the folder: nothing of what was there is kept."""
        if not self._folder.is_dir():
            self._held.clear()
            with suppress(OSError):  # the next copy says why
                self._folder.mkdir(mode=0o700, parents=True)
                _log.error("%s was deleted: made again, without its replicas", self._folder)

    def _older_of_two(self, rank: int) -> Name | None:
        names = sorted(name for name in self._held if name.rank == rank)
        return names[0] if len(names) > 1 else None

    def _set_aside(self, name: Name) -> Path | None:
        """Drop a replica; return its file when that can be used again."""
        aside = self._hidden(_SPARE)
        if self._durable or not set_aside(self._folder / name.file, aside):
            self._drop(name)
            return None
        self._held.pop(name)
        return aside

    def _forget(self, name: Name) -> None:
        _log.warning("the replica of %s cannot be read; dropped", label(name))
        self._drop(name)

    def _drop(self, name: Name) -> None:
        self._held.pop(name, None)
        with suppress(OSError):
            (self._folder / name.file).unlink(missing_ok=True)


def label(name: Name) -> str:
    """Say for a person which snapshot it is."""
    return f"rank {name.rank} step {name.step} attempt {name.attempt}"


def _read(path: Path) -> Offer | None:
    """Describe a file with a replica's name; one that is none is of no use to anybody."""
    try:
        with SnapshotFile(path) as snapshot:
            offer = Offer.from_json(snapshot.offer(0).to_json())
            (at, nbytes), _ = snapshot.spans(0, offer)
            packed = os.pread(snapshot.file.fileno(), nbytes, at)
        if offer.name.file == path.name and crc64(packed) == offer.meta_crc64:
            return offer
        why = "not what its name or its header says"
    except (CheckpointingError, OSError) as error:
        why = str(error)
    _log.warning("%s is no replica and is dropped: %s", path.name, why)
    with suppress(OSError):
        path.unlink()
    return None
