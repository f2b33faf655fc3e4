from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from monitors.gpu.readings import GpuReading, unanswered
from monitors.host import HostReading
from monitors.observations import NotMeasured, Ok, Unknown
from monitors.prometheus.exporter import CONTENT_TYPE, NodeExporter
from monitors.prometheus.reader import NodeReading, fetch, parse
from monitors.prometheus.snapshot import NodeSnapshot, RankSample


def ok(value: float) -> Ok[float]:
    return Ok(value=value, source="nvml", at=1.0)


HOST = Ok(
    value=HostReading(load1=1.5, memory_total_bytes=64 << 30, memory_available_bytes=32 << 30),
    source="procfs",
    at=1.0,
)
GPU = GpuReading(
    index=0,
    uuid="GPU-0",
    busy_ratio=ok(0.5),
    memory_used_bytes=ok(77.0 * 2**30),
    memory_total_bytes=ok(80.0 * 2**30),
    power_watts=ok(412.5),
    temperature_celsius=NotMeasured(why="Not Supported", source="nvml", at=1.0),
)
LOST = unanswered(1, "GPU-1", Unknown(why="GPU is lost", source="nvml", at=1.0))
FULL = NodeSnapshot(
    run="moe",
    node="n1",
    attempt=3,
    ranks=(
        RankSample(rank=0, step=40, phase="step", heartbeat_age_s=0.25),
        RankSample(rank=1, phase="dreaming"),
    ),
    host=HOST,
    gpus=(GPU, LOST),
    log_lines=1234,
    signature_matches={"gloo_peer_closed": 2},
    copy_failures={"peer": 3},
    sources={"log": 1700000000.0},
)
BARE = NodeSnapshot(run="moe", node="n1", host=Unknown(why="no procfs", source="procfs", at=1.0))


def page(snapshot: NodeSnapshot) -> str:
    return NodeExporter(lambda: snapshot).render().decode()


def read(text: str) -> NodeReading:
    answer = parse(text, source="test", at=5.0)
    assert isinstance(answer, Ok)
    (node,) = answer.value
    return node


def test_a_node_reads_back_what_it_exported() -> None:
    node = read(page(FULL))
    assert node.node == "n1"
    assert isinstance(node.host, Ok)
    assert isinstance(HOST, Ok)
    assert node.host.value == HOST.value
    assert node.ranks == (
        RankSample(rank=0, step=40, phase="step", heartbeat_age_s=0.25),
        RankSample(rank=1, step=None, phase="other", heartbeat_age_s=None),
    )
    assert node.signature_matches == {"gloo_peer_closed": 2}
    assert node.sources == {"log": 1700000000.0}
    well, lost = node.gpus
    assert isinstance(well.power_watts, Ok)
    assert well.power_watts.value == 412.5
    assert isinstance(well.temperature_celsius, NotMeasured)
    assert isinstance(lost.busy_ratio, Unknown)


def test_names_have_the_prefix_and_counters_end_in_total() -> None:
    names = [line.split()[2] for line in page(FULL).splitlines() if line.startswith("# TYPE")]
    counters = [line for line in page(FULL).splitlines() if line.endswith(" counter")]
    assert all(name.startswith("everstep_") for name in names)
    assert counters
    assert all(line.split()[2].endswith("_total") for line in counters)
    assert CONTENT_TYPE.startswith("text/plain")


def test_what_has_no_source_is_absent_and_not_zero() -> None:
    text = page(BARE)
    for name in ("gpu", "rank_", "node_load1", "node_memory", "source_last"):
        assert f"everstep_{name}" not in text


def test_nothing_survives_its_source() -> None:
    now = [FULL]
    exporter = NodeExporter(lambda: now[0])
    assert b'rank="1"' in exporter.render()
    now[0] = replace(FULL, ranks=FULL.ranks[:1], gpus=())
    text = exporter.render()
    assert b'rank="1"' not in text
    assert b"everstep_gpu" not in text


def test_a_snapshot_is_taken_once_for_each_scrape_and_not_before() -> None:
    taken = []

    def snapshot() -> NodeSnapshot:
        taken.append(1)
        return BARE

    exporter = NodeExporter(snapshot)
    assert taken == []
    exporter.render()
    assert taken == [1]


DCGM_OLD = """\
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",Hostname="n7"} 87
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",Hostname="n7"} 1024
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a",Hostname="n7"} 140737488355328.0
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a",Hostname="n7"} 2147483632
"""
DCGM_NEW = """\
# TYPE DCGM_FI_DEV_GPU_UTIL_RATIO gauge
DCGM_FI_DEV_GPU_UTIL_RATIO{gpu="0",UUID="GPU-a",hostname="n7"} 0.87
# TYPE DCGM_FI_DEV_FB_USED_BYTES gauge
DCGM_FI_DEV_FB_USED_BYTES{gpu="0",UUID="GPU-a",hostname="n7"} 1073741824
"""


@pytest.mark.parametrize("text", [DCGM_OLD, DCGM_NEW])
def test_both_families_of_dcgm_names_give_base_units(text: str) -> None:
    node = read(text)
    (gpu,) = node.gpus
    assert (node.node, gpu.uuid) == ("n7", "GPU-a")
    assert isinstance(gpu.busy_ratio, Ok)
    assert gpu.busy_ratio.value == pytest.approx(0.87)
    assert isinstance(gpu.memory_used_bytes, Ok)
    assert gpu.memory_used_bytes.value == float(1 << 30)


def test_a_blank_of_dcgm_is_not_a_number() -> None:
    (gpu,) = read(DCGM_OLD).gpus
    assert isinstance(gpu.power_watts, NotMeasured)
    assert isinstance(gpu.temperature_celsius, NotMeasured)


@pytest.mark.parametrize("text", ["", "<html>502 Bad Gateway</html>", "{", 'a{b="c'])
def test_a_page_that_holds_no_metrics_is_unknown(text: str) -> None:
    assert isinstance(parse(text, source="test", at=1.0), Unknown)


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Be quiet."""

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/metrics"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_an_exporter_is_read_over_http() -> None:
    body = NodeExporter(lambda: FULL).render()
    with server(lambda h: send(h, 200, body)) as url:
        answer = fetch(url, clock=lambda: 9.0)
    assert isinstance(answer, Ok)
    assert (answer.at, answer.source) == (9.0, url)
    assert answer.value[0].node == "n1"


def test_an_exporter_that_answers_an_error_is_unknown_with_the_reason() -> None:
    with server(lambda h: send(h, 503, b"")) as url:
        answer = fetch(url)
    assert isinstance(answer, Unknown)
    assert "503" in answer.why


def test_an_exporter_that_is_not_there_is_unknown() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        answer = fetch(f"http://127.0.0.1:{closed.getsockname()[1]}/metrics", timeout_s=1.0)
    assert isinstance(answer, Unknown)
    assert "refused" in answer.why


def test_an_exporter_that_never_answers_is_unknown() -> None:
    release = threading.Event()

    def wait(_: BaseHTTPRequestHandler) -> None:
        release.wait(10)

    with server(wait) as url:
        answer = fetch(url, timeout_s=0.1)
        release.set()
    assert isinstance(answer, Unknown)


def test_an_exporter_that_drips_its_answer_is_cut_off() -> None:
    release = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not release.wait(0.02):
                handler.wfile.write(b"# drip\n")
                handler.wfile.flush()
        except OSError:
            handler.close_connection = True

    with server(drip) as url:
        answer = fetch(url, timeout_s=0.2)
        release.set()
    assert isinstance(answer, Unknown)


def test_an_exporter_that_drips_its_headers_is_cut_off() -> None:
    was_read_to_the_end = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        try:
            handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
            for _ in range(100):
                handler.wfile.write(b"a")
                handler.wfile.flush()
                threading.Event().wait(0.02)
        except OSError:
            return
        was_read_to_the_end.set()

    with server(drip) as url:
        answer = fetch(url, timeout_s=0.2)
    assert isinstance(answer, Unknown)
    assert not was_read_to_the_end.is_set()


@pytest.mark.parametrize("url", ["file:///etc/hostname", "n1:9400", "http://"])
def test_only_http_addresses_are_asked(url: str) -> None:
    assert isinstance(fetch(url), Unknown)
