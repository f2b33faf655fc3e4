"""All that one of these processes does, put together."""

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checkpointing import checked
from checkpointing.errors import ManifestInvalid, ReplicaError
from checkpointing.replicas import exchange
from checkpointing.replicas.copies import Copies, Emit, Holds, name_of
from checkpointing.replicas.fetching import Fetcher, Order
from checkpointing.replicas.replica import Offer
from checkpointing.replicas.room import Room, on_disk
from checkpointing.replicas.server import Server
from checkpointing.replicas.shelf import Shelf
from checkpointing.replicas.snapshot import FileSource, SnapshotFile
from checkpointing.replicas.wire import Secret, parse
from checkpointing.stage.arena import StagedSlot
from checkpointing.store.budget import Budget
from checkpointing.store.pace import Pacer
from checkpointing.tiers import Tier

_log = logging.getLogger(__name__)
_POLL_S: Final = 0.03
_ALIVE_S: Final = 5.0
_DRAIN_S: Final = 10.0
_TELL_S: Final = 0.5  # each time all of it is told, and the journal keeps it
_FETCHES_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a process works.

    Attributes:
        folder: The node's folder in memory, with the arenas.
        run: Name of the run.
        host: Address to listen on.
        disk: Folder on a disk; None for no replicas there.
        max_bytes_per_s: For all copies together; None for no limit.
    """

    folder: Path
    run: str
    host: str
    disk: Path | None = None
    max_bytes_per_s: float | None = None


class Node:
    """One node's replicas.

    Args:
        setting: Where it works.
        token: What all nodes of the run know.
        emit: Takes the events.

    Raises:
        OSError: A folder or the address cannot be had.
    """

    def __init__(self, setting: Setting, token: bytes, emit: Emit) -> None:
        self._folder = setting.folder
        self._emit = emit
        self._secret = Secret(run=setting.run, token=token)
        self._pace = Pacer(Budget(max_bytes_per_s=setting.max_bytes_per_s))
        self._buddy: str | None = None
        room = Room(setting.folder)
        self._peers = Shelf(_folder(setting.folder / "replicas"), room)
        self._disk = _disk(setting)
        self._fetcher = Fetcher(setting.folder, room, self._disk, self._secret)
        self._fetches = ThreadPoolExecutor(_FETCHES_AT_ONCE, thread_name_prefix="fetch")
        self._holds = Holds()
        self._to_peer = Copies(setting.folder, Tier.PEER, self._send, self._holds, emit)
        self._to_disk = Copies(setting.folder, Tier.DISK, self._save, self._holds, emit)
        port_file = setting.folder / "replicas.port"
        self._server = Server(setting.host, self._peers, self._secret, port_file, self._disk)
        self._told: list[dict[str, Any]] | None = None
        self._tell_at = 0.0
        self._heard = True

    def run(self, stop: threading.Event) -> None:
        """Work until `stop`, then give what is being copied a short time."""
        self._server.start()
        self._say({"event": "listening", "address": self._server.address})
        next_sign = 0.0
        while not stop.is_set() and self._heard:
            if time.monotonic() >= next_sign:
                next_sign = time.monotonic() + _ALIVE_S
                self._say({"event": "alive"})
            if self._buddy is not None:
                self._to_peer.poll()
            if self._disk is not None:
                self._to_disk.poll()
            self._look()
            stop.wait(_POLL_S)
        self._server.close()
        deadline = time.monotonic() + _DRAIN_S
        while (self._to_peer.busy or self._to_disk.busy) and time.monotonic() < deadline:
            self._look()
            time.sleep(_POLL_S)
        self._tell_at = 0.0
        self._look()

    def obey(self, line: bytes) -> None:
        """Carry out an order; what is none is told and passed over."""
        try:
            order = checked.document(line)
            match order.get("do"):
                case "buddy":
                    self._set_buddy(order.get("address"))
                case "fetch":
                    wanted = Order.from_json(order, self._folder)
                    self._fetcher.accept(wanted)
                    self._fetches.submit(self._fetch, wanted)
                case "give_up":
                    self._fetcher.give_up(checked.number(order.get("id"), "id"))
                case "clear":
                    self._peers.clear()
                case other:
                    checked.refuse("an order of no known kind", other)
        except (ManifestInvalid, ReplicaError) as error:
            self._say({"event": "refused", "error": str(error)[:500]})

    def _set_buddy(self, address: object) -> None:
        if address is not None:
            parse(checked.text(address, "address", longest=300))
        self._buddy = None if address is None else str(address)
        self._to_peer.forget()

    def _send(self, snapshot: SnapshotFile, staged: StagedSlot) -> int:
        buddy = self._buddy
        if buddy is None:
            raise ReplicaError("there is no node to copy to any more")
        return exchange.put(buddy, self._secret, snapshot, staged.index, self._pace)

    def _save(self, snapshot: SnapshotFile, staged: StagedSlot) -> int:
        assert self._disk is not None
        if not self._disk.needs(name_of(staged)):
            return 0
        offer = snapshot.offer(staged.index)
        source = FileSource(snapshot, staged.index, offer, self._pace)
        with self._disk.room_for(offer) as share:
            self._disk.keep(offer, source, share)
        self._disk.tidy()
        return offer.total

    def _fetch(self, order: Order) -> None:
        begun = time.monotonic()
        fetched = self._fetcher.fetch(order)
        self._say(
            {
                "event": "fetched",
                "id": order.number,
                "ok": not fetched.error,
                "from": fetched.source,
                "nbytes": fetched.nbytes,
                "seconds": time.monotonic() - begun,
                "error": fetched.error,
            }
        )

    def _look(self) -> None:
        """Renew what is held against the ranks, and tell what is kept when that has changed."""
        self._holds.renew()
        self._peers.drop_idle()
        if time.monotonic() < self._tell_at:
            return
        held = [_described("peer", offer) for offer in self._peers.held()]
        if self._disk is not None:
            held += [_described("disk", offer) for offer in self._disk.held()]
        if held != self._told:
            self._told = held
            self._tell_at = time.monotonic() + _TELL_S
            self._say({"event": "held", "replicas": held})

    def _say(self, event: Mapping[str, Any]) -> None:
        self._heard = self._emit(event) and self._heard


def _described(tier: str, offer: Offer) -> dict[str, Any]:
    return {
        "tier": tier,
        **offer.name.to_json(),
        "nbytes": offer.nbytes,
        "staged_at": offer.staged_at,
    }


def _disk(setting: Setting) -> Shelf | None:
    """Open the disk's replicas; a disk that cannot be used leaves the other tiers alone."""
    if setting.disk is None:
        return None
    try:
        folder = _folder(setting.disk / setting.run)
        return Shelf(folder, Room(folder, on_disk), durable=True)
    except OSError as error:
        _log.error("nothing is copied to a disk here: %s", error)
        return None


def _folder(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
