"""Asks another node: to keep a snapshot, or to give one back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from checkpointing.errors import ManifestInvalid, ReplicaError
from checkpointing.replicas.replica import Name, Offer
from checkpointing.replicas.snapshot import SnapshotFile
from checkpointing.replicas.wire import Line, Secret, dial
from checkpointing.store.pace import Pacer


def put(address: str, secret: Secret, snapshot: SnapshotFile, index: int, pace: Pacer) -> int:
    """Have another node keep a slot; return the bytes sent, 0 when it needs none of them.

    Raises:
        ReplicaError: It does not take it, or what came there was not what was sent.
        OSError: It does not answer, or broke off.
    """
    offer = snapshot.offer(index)
    with dial(address, secret) as line:
        line.say(do="put", offer=offer.to_json())
        answer = line.hear()
        if answer.get("say") == "have":
            return 0
        _expect(answer, "send")
        line.allow(offer.total)
        try:
            send_body(line, snapshot, index, offer, pace)
        except OSError:
            with suppress(OSError):
                _expect(line.hear(), "kept")  # it may have said why
            raise
        _expect(line.hear(), "kept")
    return offer.total


@contextmanager
def get(address: str, secret: Secret, name: Name) -> Iterator[tuple[Offer, Line]]:
    """Have another node give a replica: its description, and its bytes on the line.

    Raises:
        ReplicaError: It has none.
        OSError: It does not answer.
    """
    with dial(address, secret) as line:
        line.say(do="get", **name.to_json())
        answer = line.hear()
        _expect(answer, "here")
        try:
            offer = Offer.from_json(answer["offer"])
        except (KeyError, TypeError, ManifestInvalid) as error:
            raise ReplicaError(f"a description that is none: {error}") from error
        if offer.name != name:
            raise ReplicaError(f"the other side gives {offer.name} for {name}")
        line.allow(offer.total)
        yield offer, line


def send_body(line: Line, snapshot: SnapshotFile, index: int, offer: Offer, pace: Pacer) -> None:
    """Send what an offer announced: the meta, then the extents."""
    send = line.send_memory if snapshot.in_memory else line.send_file
    for at, nbytes in snapshot.spans(index, offer):
        send(snapshot.file, at, nbytes, pace)


def _expect(answer: Mapping[str, Any], word: str) -> None:
    if answer.get("say") != word:
        raise ReplicaError(f"the other side says {answer.get('why', answer)!s:.300}")
