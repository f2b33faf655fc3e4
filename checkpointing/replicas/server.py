"""Answers the other nodes: takes their ranks' snapshots in, and gives them back."""

import logging
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from checkpointing import checked
from checkpointing.errors import ArenaInvalid, ManifestInvalid, ReplicaError
from checkpointing.replicas.exchange import send_body
from checkpointing.replicas.replica import Name, Offer
from checkpointing.replicas.shelf import Shelf
from checkpointing.replicas.snapshot import SnapshotFile
from checkpointing.replicas.wire import Line, Secret, parse, welcome
from checkpointing.store.pace import Pacer

_MOST_LINES: Final = 64
_BACKLOG: Final = 64
_REQUEST: Final = frozenset({"do", "offer"})
_log = logging.getLogger(__name__)


class Server:
    """Listens on one address; a thread for each connection, and a bounded number of those.

    Args:
        host: Address to listen on.
        shelf: Where snapshots are kept.
        secret: What who connects has to know.
        port_file: Remembers the port, so that the next process of this node has the same.
        disk: This node's own, which it gives to ranks that are elsewhere by now.
    """

    def __init__(
        self, host: str, shelf: Shelf, secret: Secret, port_file: Path, disk: Shelf | None = None
    ) -> None:
        self._shelf = shelf
        self._disk = disk
        self._closed = False
        self._secret = secret
        self._free = threading.BoundedSemaphore(_MOST_LINES)
        self._socket = _listen(host, port_file)
        port = self._socket.getsockname()[1]
        port_file.write_text(str(port))
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> None:
        """Answer from now on, on threads of its own."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # to close it alone wakes nobody who accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # no descriptors left, say: who waits asks again
                if self._closed:
                    return
                _log.warning("cannot accept: %s", error)
                threading.Event().wait(1.0)
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()
            except RuntimeError as error:  # no thread to be had
                _log.warning("cannot answer: %s", error)
                connection.close()
                self._free.release()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with welcome(connection, self._secret) as line:
                self._answer(line, line.hear())
        except (ReplicaError, OSError) as error:
            _log.warning("a connection ended: %s", error)
        finally:
            self._free.release()

    def _answer(self, line: Line, request: Mapping[str, Any]) -> None:
        try:
            if request.get("do") == "put":
                checked.exactly(request, _REQUEST, "a request")
                self._put(line, Offer.from_json(request["offer"]))
            elif request.get("do") == "get":
                self._get(line, Name.from_json(request))
            else:
                checked.refuse("a request of no known kind", request.get("do"))
        except (ReplicaError, ManifestInvalid, ArenaInvalid) as error:
            line.say(say="no", why=" ".join(str(error).split())[:500])
            raise ReplicaError(f"refused: {error}") from error

    def _put(self, line: Line, offer: Offer) -> None:
        if not self._shelf.needs(offer.name):
            line.say(say="have")
            return
        with self._shelf.room_for(offer) as share:
            line.allow(offer.total)
            line.say(say="send")
            self._shelf.keep(offer, line, share)
            line.say(say="kept")
        self._shelf.tidy()  # nobody waits for that

    def _get(self, line: Line, name: Name) -> None:
        with self._open(name) as snapshot:
            offer = snapshot.offer(0)
            line.allow(offer.total)
            line.say(say="here", offer=offer.to_json())
            send_body(line, snapshot, 0, offer, Pacer())  # ranks wait for it: as fast as can be

    def _open(self, name: Name) -> SnapshotFile:
        try:
            return self._shelf.open(name)
        except ReplicaError:
            if self._disk is None:
                raise
            return self._disk.open(name)


def _listen(host: str, port_file: Path) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        before = parse(f"{host}:{port_file.read_text()}")[1]
        return socket.create_server((host, before), family=family, backlog=_BACKLOG)
    except (OSError, ValueError, ReplicaError):  # none before this, or taken meanwhile
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)
