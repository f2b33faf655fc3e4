"""Brings a replica back: a complete arena file, from which a rank restores as from its own."""

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

from checkpointing import checked
from checkpointing.errors import CheckpointingError, ReplicaError
from checkpointing.replicas.exchange import get
from checkpointing.replicas.replica import Name, Offer
from checkpointing.replicas.room import Room, Share
from checkpointing.replicas.shelf import Shelf
from checkpointing.replicas.snapshot import FileSource, Source
from checkpointing.replicas.taking import take
from checkpointing.replicas.wire import Secret
from checkpointing.stage.arena import SLOTS, Capacities
from checkpointing.store.pace import Pacer

DISK: Final = "disk"
_TEMPORARY: Final = ".fetching-"
_MOST_SOURCES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to fetch.

    Attributes:
        number: Of the order.
        name: Which snapshot.
        sources: From whom, in this order.
        arena: As which file.
    """

    number: int
    name: Name
    sources: tuple[str, ...]
    arena: Path

    @classmethod
    def from_json(cls, found: Mapping[str, Any], folder: Path) -> "Order":
        """Read an order; the arena has to lie in this node's folder.

        Raises:
            ManifestInvalid: A field is missing or out of range.
        """
        sources = checked.items(found.get("from"), "from")
        if not 0 < len(sources) <= _MOST_SOURCES:
            checked.refuse(f"{len(sources)} sources")
        arena = Path(checked.text(found.get("arena"), "arena"))
        if arena.parent != folder or not arena.name.startswith("arena-"):
            checked.refuse(f"arena is none in {folder}", str(arena))
        return cls(
            number=checked.number(found.get("id"), "id"),
            name=Name.from_json(found),
            sources=tuple(checked.text(source, "from", longest=300) for source in sources),
            arena=arena,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """How a fetch ended: where it came from, or why from nowhere."""

    source: str
    nbytes: int
    error: str


class _WhileWanted:
    """A source that ends with its order: its memory and its thread are for the next ones."""

    def __init__(self, source: Source, check: Callable[[], None]) -> None:
        self._source = source
        self._check = check

    def read_into(self, out: memoryview) -> None:
        """Fill all of `out` with what comes next, if anybody still waits for it."""
        self._check()
        self._source.read_into(out)


class Fetcher:
    """Carries out orders.

    Args:
        folder: Holds the files `arena-*`.
        room: How much may be written there.
        disk: This node's own replicas; None when it has no disk for them.
        secret: What the other nodes want to be shown.
    """

    def __init__(self, folder: Path, room: Room, disk: Shelf | None, secret: Secret) -> None:
        self._folder = folder
        self._room = room
        self._disk = disk
        self._secret = secret
        self._lock = threading.Lock()
        self._wanted: set[int] = set()
        for path in folder.glob(f"{_TEMPORARY}*"):  # of a killed one
            path.unlink(missing_ok=True)

    def accept(self, order: Order) -> None:
        """Take an order, which is carried out by `fetch`."""
        with self._lock:
            self._wanted.add(order.number)

    def give_up(self, number: int) -> None:
        """From now on this order, if it is not done, puts no file in an arena's place."""
        with self._lock:
            self._wanted.discard(number)

    def fetch(self, order: Order) -> Fetched:
        """Try one source after the other."""
        errors = []
        for source in order.sources:
            try:
                self._check_wanted(order.number)
                with self._opened(source, order.name) as (offer, body):
                    self._write(order, offer, body)
                return Fetched(source=source, nbytes=offer.total, error="")
            except (CheckpointingError, OSError) as error:
                errors.append(f"{source}: {error or type(error).__name__}")
        self.give_up(order.number)
        return Fetched(source="", nbytes=0, error=" ".join("; ".join(errors).split())[:500])

    def _opened(self, source: str, name: Name) -> AbstractContextManager[tuple[Offer, Source]]:
        return self._from_disk(name) if source == DISK else get(source, self._secret, name)

    @contextmanager
    def _from_disk(self, name: Name) -> Iterator[tuple[Offer, Source]]:
        if self._disk is None:
            raise ReplicaError("this node has no disk for replicas")
        with self._disk.open(name) as snapshot:
            offer = snapshot.offer(0)
            yield offer, FileSource(snapshot, 0, offer, Pacer())

    def _write(self, order: Order, offer: Offer, body: Source) -> None:
        """Write the arena with as many slots as there is room for."""
        path = self._folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
        capacities, share = self._share(offer)
        with share:
            try:
                with FileIO(path, "x+") as file:
                    wanted = _WhileWanted(body, lambda: self._check_wanted(order.number))
                    take(offer, wanted, file, share)
                    # A sparse file would fail with SIGBUS in mid-training.
                    os.posix_fallocate(file.fileno(), 0, capacities.file_nbytes)
                    os.pwrite(file.fileno(), capacities.pack(), 0)
                self._install(path, order)
            finally:
                path.unlink(missing_ok=True)

    def _install(self, path: Path, order: Order) -> None:
        with self._lock:
            self._check_wanted_locked(order.number)  # ranks may run by now
            self._wanted.discard(order.number)
            path.replace(order.arena)

    def _check_wanted(self, number: int) -> None:
        with self._lock:
            self._check_wanted_locked(number)

    def _check_wanted_locked(self, number: int) -> None:
        if number not in self._wanted:
            raise ReplicaError("nobody waits for it any more")

    def _share(self, offer: Offer) -> tuple[Capacities, Share]:
        """Take the memory for two slots, or for one where it is scarce."""
        two, one = (
            Capacities(meta=offer.meta_room, data=offer.data_room, slots=slots)
            for slots in (SLOTS, 1)
        )
        try:
            return two, self._room.share(two.file_nbytes)
        except ReplicaError:
            return one, self._room.share(one.file_nbytes)
