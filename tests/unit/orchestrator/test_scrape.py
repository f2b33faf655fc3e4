import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from monitors.host import HostReading
from monitors.observations import Ok, Unknown
from monitors.prometheus.exporter import NodeExporter
from monitors.prometheus.snapshot import NodeSnapshot
from orchestrator.core.node import Node
from orchestrator.core.state import State
from orchestrator.supervisor import scrape
from orchestrator.supervisor.scrape import Scraper
from tests.unit.orchestrator.desk import free_port

HOST = HostReading(load1=1.5, memory_available_bytes=7 << 30, memory_total_bytes=8 << 30)


def text_of(node: str) -> bytes:
    snapshot = NodeSnapshot(
        run="big",
        node=node,
        attempt=1,
        ranks=(),
        host=Ok(value=HOST, source="test", at=time.time()),
        gpus=(),
        log_lines=0,
        signature_matches={},
        sources={},
    )
    return NodeExporter(lambda: snapshot).render()


@contextmanager
def exporter(body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def living(**urls: str) -> State:
    nodes = {
        name: Node(
            name=name, incarnation="i", alive=True, address="", metrics_url=url, joined_seq=1
        )
        for name, url in urls.items()
    }
    return State(nodes=nodes)


def test_a_node_that_was_not_asked_is_not_measured() -> None:
    assert Scraper().of("n0")["state"] == "not_measured"


def test_what_an_exporter_says_is_kept_by_node() -> None:
    scraper = Scraper()
    with exporter(text_of("n0")) as url:
        asyncio.run(scraper.once(living(n0=url)))
    seen = scraper.of("n0")
    assert (seen["state"], seen["load1"], seen["memory_available_bytes"]) == ("ok", 1.5, 7 << 30)
    assert seen["gpus"] == []


def test_an_exporter_that_does_not_answer_is_unknown_and_delays_no_other() -> None:
    scraper = Scraper()
    dead = f"http://127.0.0.1:{free_port()}/metrics"
    with exporter(text_of("n0")) as url:
        asyncio.run(scraper.once(living(n0=url, n1=dead)))
    assert scraper.of("n0")["state"] == "ok"
    assert scraper.of("n1")["state"] == "unknown"
    assert scraper.of("n1")["why"]


def test_an_exporter_that_speaks_of_another_node_is_unknown() -> None:
    scraper = Scraper()
    with exporter(text_of("n7")) as url:
        asyncio.run(scraper.once(living(n0=url)))
    assert scraper.of("n0")["state"] == "unknown"


def test_an_old_answer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    scraper = Scraper()
    with exporter(text_of("n0")) as url:
        asyncio.run(scraper.once(living(n0=url)))
    now = time.time()
    monkeypatch.setattr(scrape.time, "time", lambda: now + scrape.STALE_S + 1)
    assert scraper.of("n0")["state"] == "unknown"
    assert "s ago" in scraper.of("n0")["why"]


def test_lost_nodes_and_nodes_without_an_exporter_are_not_asked() -> None:
    scraper = Scraper()
    state = living(n0="", n1="http://127.0.0.1:1/metrics")
    state = replace(state, nodes={**state.nodes, "n1": replace(state.nodes["n1"], alive=False)})
    asyncio.run(scraper.once(state))
    assert scraper.of("n0")["state"] == "not_measured"
    assert scraper.of("n1")["state"] == "not_measured"


def test_exporters_that_do_not_answer_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit and a look at the allocation wait for a thread as well."""
    gate = threading.Event()

    def hang(url: str, *, timeout_s: float) -> Unknown:
        gate.wait(30)
        return Unknown(why="no answer", source=url, at=0.0)

    monkeypatch.setattr(scrape, "fetch", hang)

    async def main() -> None:
        state = living(**{f"n{number}": "http://n" for number in range(200)})
        asking = asyncio.ensure_future(Scraper().once(state))
        await asyncio.sleep(0.05)
        try:
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 5) == 7
        finally:
            gate.set()
            await asking

    asyncio.run(main())
