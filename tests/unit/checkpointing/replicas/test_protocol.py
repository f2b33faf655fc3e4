"""The protocol against who does not keep to it: refused, at once, and nothing is allocated."""

import json
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing.errors import ManifestInvalid, ReplicaError
from checkpointing.replicas import exchange, wire
from checkpointing.replicas.fetching import Order
from checkpointing.replicas.replica import Name, Offer
from checkpointing.replicas.server import Server
from checkpointing.replicas.snapshot import SnapshotFile
from checkpointing.replicas.wire import MAGIC, NONCE, PROOF, Line, Secret, dial
from checkpointing.store.pace import Pacer
from tests.unit.checkpointing.replicas.made import SECRET, Rank, Served, put_on, served, shelf

NAME = Name(attempt=1, step=1, rank=0, world=1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as running:
        yield running


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    staged = Rank(tmp_path / "n")
    staged.stage(1)
    return staged


def connected(server: Served) -> socket.socket:
    return socket.create_connection(wire.parse(server.address), timeout=5)


def read(plain: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        chunk = plain.recv(count - len(found))
        if not chunk:
            break
        found += chunk
    return found


def frame(value: object) -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack(">I", len(body)) + body


def held(server: Served) -> list[int]:
    return [offer.name.step for offer in server.shelf.held()]


def offer_of(rank: Rank) -> dict[str, Any]:
    with SnapshotFile(rank.path) as snapshot:
        return snapshot.offer(0).to_json()


def answer(server: Served, request: bytes) -> dict[str, Any] | None:
    """Send bytes as somebody who knows the token."""
    with dial(server.address, SECRET) as line:
        line.send(request)
        try:
            return dict(line.hear())
        except (ReplicaError, OSError):
            return None


def test_a_slot_is_copied_once_and_given_back(server: Served, rank: Rank, tmp_path: Path) -> None:
    with SnapshotFile(rank.path) as snapshot:
        assert exchange.put(server.address, SECRET, snapshot, 0, Pacer()) > 40_000
        assert exchange.put(server.address, SECRET, snapshot, 0, Pacer()) == 0
        offer = snapshot.offer(0)
    assert held(server) == [1]
    with exchange.get(server.address, SECRET, NAME) as (given, line):
        assert given == offer
        body = line.read(given.total)
    with SnapshotFile(rank.path) as snapshot:
        start = snapshot.capacities.data_at(0)
    assert rank.path.read_bytes()[start : start + 40_000] in body


def test_a_node_gives_what_lies_on_its_disk_too(tmp_path: Path, rank: Rank) -> None:
    disk = shelf(tmp_path / "disk")
    offer = put_on(disk, rank, 7)
    server = Server("127.0.0.1", shelf(tmp_path / "peers"), SECRET, tmp_path / "port", disk)
    server.start()
    try:
        with exchange.get(server.address, SECRET, offer.name) as (given, line):
            assert given == offer
            assert len(line.read(given.total)) == offer.total
        with pytest.raises(ReplicaError), exchange.get(server.address, SECRET, NAME):
            pass
    finally:
        server.close()


@pytest.mark.parametrize(
    "secret",
    [Secret(run="r", token=b"another token!!!"), Secret(run="other", token=SECRET.token)],
)
def test_a_wrong_token_or_run_is_turned_away(server: Served, secret: Secret) -> None:
    with pytest.raises((ReplicaError, OSError)):
        dial(server.address, secret)


def test_a_proof_that_was_heard_once_is_worth_nothing(server: Served) -> None:
    with connected(server) as first:
        nonce = read(first, len(MAGIC) + NONCE)[len(MAGIC) :]
        mine = b"n" * NONCE
        said = mine + SECRET.proof(b"client", nonce, mine)
        first.sendall(said)
        assert len(read(first, PROOF)) == PROOF
    with connected(server) as second:
        read(second, len(MAGIC) + NONCE)
        second.sendall(said)
        assert read(second, PROOF) == b""


def test_a_servers_own_proof_cannot_be_turned_against_it(server: Served) -> None:
    with connected(server) as plain:
        nonce = read(plain, len(MAGIC) + NONCE)[len(MAGIC) :]
        plain.sendall(nonce + SECRET.proof(b"server", nonce, nonce))
        assert read(plain, PROOF) == b""


def test_a_client_talks_to_no_server_that_does_not_know_the_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def imitate() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(MAGIC + b"n" * NONCE)
                read(connection, NONCE + PROOF)
                connection.sendall(b"p" * PROOF)

        thread = threading.Thread(target=imitate)
        thread.start()
        with pytest.raises(ReplicaError, match="does not know"):
            dial(f"127.0.0.1:{listening.getsockname()[1]}", SECRET)
        thread.join(5)


def test_who_says_nothing_or_only_half_is_left(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_GREETING_S", 0.2)
    with connected(server) as silent, connected(server) as slow:
        slow.sendall(b"n")
        for plain in (silent, slow):
            read(plain, len(MAGIC) + NONCE)
            assert plain.recv(1) == b""


def test_more_connections_than_there_are_threads_for_are_closed(server: Served) -> None:
    plain = [connected(server) for _ in range(65)]
    assert read(plain[-1], 1) == b""
    for one in plain:
        one.close()


HOSTILE: list[dict[str, Any]] = [
    {"nbytes": 1 << 60},
    {"nbytes": -1},
    {"nbytes": 2.0},
    {"nbytes": True},
    {"nbytes": "1"},
    {"data_room": 1 << 60},
    {"data_room": 4097},
    {"meta_nbytes": 1 << 30, "meta_room": 1 << 30},
    {"meta_nbytes": 1 << 20},
    {"meta_room": 1 << 62},
    {"meta_crc64": 1 << 64},
    {"staged_at": "now"},
    {"staged_at": 1e300},
    {"tiers": 1 << 9},
    {"name": "../../x"},
    {"name": {"rank": 0}},
    {"name": {"rank": "../x", "world": 1, "step": 1, "attempt": 1}},
    {"name": {"rank": 1, "world": 1, "step": 1, "attempt": 1}},
    {"name": {"rank": 0, "world": 1 << 40, "step": 1, "attempt": 1}},
    {"name": {"rank": 0, "world": 1, "step": 10**30, "attempt": 1}},
    {"name": {"rank": 0, "world": 1, "step": 1, "attempt": -1}},
    {"name": {"rank": 0, "world": 1, "step": 1, "attempt": 1, "path": "/etc"}},
    {"more": 1},
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_a_hostile_offer_is_refused(server: Served, rank: Rank, change: dict[str, Any]) -> None:
    with pytest.raises(ManifestInvalid):
        Offer.from_json({**offer_of(rank), **change})
    said = answer(server, frame({"do": "put", "offer": {**offer_of(rank), **change}}))
    assert said is not None
    assert said["say"] == "no"
    assert held(server) == []


@pytest.mark.parametrize(
    "request_",
    [
        frame({"do": "put"}),
        frame({"do": "put", "offer": []}),
        frame({"do": "run"}),
        frame({"do": "get", "rank": 0}),
        frame({"do": ["get"]}),
        frame([]),
        frame(b"\x80\x04"),
        frame(b'{"do": NaN}'),
        frame(b"[" * 9000),
        struct.pack(">I", 1 << 31),
        struct.pack(">I", 0),
    ],
    ids=range(11),
)
def test_a_malformed_request_is_refused_without_allocating(server: Served, request_: bytes) -> None:
    tracemalloc.start()
    try:
        said = answer(server, request_)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert said is None or said["say"] == "no"
    assert answer(server, frame({"do": "get", **NAME.to_json()})) == {
        "say": "no",
        "why": "no replica of rank 0 step 1 attempt 1 here",
    }


def test_more_than_there_is_room_for_is_refused_before_it_is_sent(
    tmp_path: Path, rank: Rank
) -> None:
    with served(tmp_path, free=1000) as server:
        said = answer(server, frame({"do": "put", "offer": offer_of(rank)}))
        assert said is not None
        assert "memory has 0.00 GiB left" in said["why"]


@pytest.mark.parametrize("sent", [0, 100, 20_000])
def test_a_stream_that_breaks_off_leaves_nothing(server: Served, rank: Rank, sent: int) -> None:
    offer = offer_of(rank)
    with SnapshotFile(rank.path) as snapshot:
        meta = rank.path.read_bytes()[snapshot.capacities.meta_at(0) :][: offer["meta_nbytes"]]
    with dial(server.address, SECRET) as line:
        line.say(do="put", offer=offer)
        assert line.hear() == {"say": "send"}
        line.send((meta + bytes(40_000))[:sent])
    deadline = time.monotonic() + 10
    while list(server.folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(server.folder.iterdir()) == []
    assert held(server) == []


def test_a_byte_that_flips_on_the_way_is_refused_and_the_next_try_is_good(
    server: Served, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(line: Line, snapshot: SnapshotFile, index: int, offer: Offer, pace: Pacer) -> None:
        body = bytearray()
        for at, nbytes in snapshot.spans(index, offer):
            body += rank.path.read_bytes()[at : at + nbytes]
        body[-30_000] ^= 1
        line.send(bytes(body))

    with SnapshotFile(rank.path) as snapshot:
        with monkeypatch.context() as patch:
            patch.setattr(exchange, "send_body", flip)
            with pytest.raises(ReplicaError, match="fail their CRC"):
                exchange.put(server.address, SECRET, snapshot, 0, Pacer())
        assert held(server) == []
        exchange.put(server.address, SECRET, snapshot, 0, Pacer())
    assert held(server) == [1]


def test_a_conversation_that_takes_too_long_ends_though_bytes_still_come() -> None:
    one, other = socket.socketpair()

    def drip() -> None:
        for _ in range(100):
            try:
                other.sendall(b"x")
            except OSError:
                return
            time.sleep(0.02)

    thread = threading.Thread(target=drip)
    thread.start()
    with Line(one, 0.2) as line, pytest.raises((ReplicaError, TimeoutError)):
        line.read(1000)
    other.close()
    thread.join(10)


@pytest.mark.parametrize("how", ["send_file", "send_memory"])
def test_sending_a_file_to_one_who_hardly_reads_ends_in_time(tmp_path: Path, how: str) -> None:
    one, other = socket.socketpair()
    ended = threading.Event()

    def sip() -> None:
        while not ended.wait(0.01) and other.recv(64 << 10):
            pass

    thread = threading.Thread(target=sip)
    thread.start()
    (tmp_path / "file").write_bytes(bytes(8 << 20))  # one piece
    begun = time.monotonic()
    sends = pytest.raises((ReplicaError, TimeoutError))
    with Line(one, 0.3) as line, (tmp_path / "file").open("rb") as file, sends:
        getattr(line, how)(file, 0, 8 << 20, Pacer())
    assert time.monotonic() - begun < 2
    ended.set()
    thread.join(10)
    other.close()


def test_the_next_process_of_a_node_has_the_same_port(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        first = server.address
    with served(tmp_path) as server:
        assert server.address == first


@pytest.mark.parametrize("address", ["", "h", "h:", ":1", "h:0", "h:65536", "h:-1", "h:1x", "h:²"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ReplicaError, match="no host:port"):
        wire.parse(address)


def test_an_order_fetches_to_no_other_place(tmp_path: Path) -> None:
    good = {"id": 1, **NAME.to_json(), "from": ["disk"], "arena": str(tmp_path / "arena-3")}
    assert Order.from_json(good, tmp_path).arena.name == "arena-3"
    for change in (
        {"arena": "/etc/arena-0"},
        {"arena": f"{tmp_path}/../arena-0"},
        {"arena": str(tmp_path / "slot-0")},
        {"from": []},
        {"from": ["disk"] * 17},
        {"from": [1]},
        {"id": "1"},
    ):
        with pytest.raises(ManifestInvalid):
            Order.from_json({**good, **change}, tmp_path)


def test_the_token_is_in_no_text() -> None:
    assert "token" not in repr(SECRET)
