"""An object's bytes from a server that breaks off."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from checkpointing.errors import ObjectCorrupt, StoreUnavailable
from checkpointing.store.s3 import S3Store

BODY = bytes(range(256)) * 4096


class Server(ThreadingHTTPServer):
    """Sends `portions[n]` bytes in the n-th answer and then closes; whole ones after that."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.portions: list[int] = []
        self.ranges: list[tuple[int, int]] = []
        self.clients: set[int] = set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        begin, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = BODY[begin : last + 1]
        self.server.ranges.append((begin, last))
        self.server.clients.add(self.client_address[1])
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.portions:
            self.wfile.write(body[: self.server.portions.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def store(server: Server, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    url = f"http://127.0.0.1:{server.server_port}"
    return S3Store(bucket="b", endpoint_url=url, region="us-east-1", attempts=3)


def test_only_what_is_missing_is_asked_for_again(server: Server, store: S3Store) -> None:
    server.portions = [150_000, 10]
    outs = [memoryview(bytearray(100_000)) for _ in range(5)]
    arrived: list[int] = []
    store.read_each("k", 1000, outs, arrived.append)
    assert arrived == [0, 1, 2, 3, 4]
    assert b"".join(outs) == BODY[1000:501_000]
    assert server.ranges == [(1000, 500_999), (101_000, 500_999), (101_000, 500_999)]


def test_a_connection_serves_again_after_a_whole_answer(server: Server, store: S3Store) -> None:
    out = memoryview(bytearray(300_000))
    for _ in range(3):
        store.read_into("k", 7, out)
    assert out == BODY[7:300_007]
    assert len(server.clients) == 1


def test_a_server_that_always_breaks_off_is_unavailable(server: Server, store: S3Store) -> None:
    server.portions = [1000] * 9
    with pytest.raises(StoreUnavailable, match="check the endpoint"):
        store.read_into("k", 0, memoryview(bytearray(5000)))


def test_an_object_that_is_too_short_is_corrupt(store: S3Store) -> None:
    with pytest.raises(ObjectCorrupt, match=f"ends at byte {len(BODY)}"):
        store.read_into("k", len(BODY) - 10, memoryview(bytearray(11)))
