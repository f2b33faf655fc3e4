"""kill -9 of the uploader at every point of its protocol; its agent starts the next one."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from checkpointing import keys
from checkpointing.checksum import crc64
from checkpointing.commit import UploadRecord, commit
from checkpointing.resolver import list_commits
from checkpointing.stage.stager import Stager
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from deploy.demo.s3_server import S3Server
from orchestrator.agent import kept
from orchestrator.agent.uploads import Uploads
from orchestrator.core.events import ShardUploaded, UploadFailed
from tests.faults.proxy import FaultProxy, Hold, Rule

pytestmark = [pytest.mark.s3, pytest.mark.slow, pytest.mark.timeout(600)]
RUN = "r"
PARTS = 3
NBYTES = 33 << 20
WAIT_S = 90.0


@dataclass(frozen=True)
class Point:
    """A request of the protocol, before or after the server does it."""

    operation: str
    after_server: bool = False
    skip: int = 0
    key: str = ""

    @property
    def label(self) -> str:
        number = f"-{self.skip + 1}" if self.skip else ""
        return f"{'after' if self.after_server else 'before'}-{self.operation}{number}"


POINTS = [
    Point("ListMultipartUploads"),
    *(Point("CreateMultipartUpload", after) for after in (False, True)),
    *(Point("UploadPart", after, part) for part in range(PARTS) for after in (False, True)),
    *(Point("CompleteMultipartUpload", after) for after in (False, True)),
    *(Point("PutObject", after, key=r"rank-00000\.json$") for after in (False, True)),
]
EVERY = pytest.param(POINTS, marks=pytest.mark.chaos, id="every point")
KINDS = [
    POINTS[0],
    Point("CreateMultipartUpload", after_server=True),
    Point("UploadPart"),
    Point("UploadPart", after_server=True, skip=PARTS - 1),
    *POINTS[-4:],
]
"""Each request once; the parts where there is none yet, and where all of them are there."""


class Node:
    """One rank's arena and the real agent's keeper of the uploader."""

    def __init__(self, folder: Path, config: StoreConfig) -> None:
        self.folder = folder
        self.facts: list[ShardUploaded | UploadFailed] = []
        self.uploads = Uploads(folder, config.to_json(), RUN, self.facts.append)
        self._stager = Stager(folder / "arena-0", attempt=1, rank=0, world=1)
        self.content: dict[int, int] = {}

    def stage(self, step: int) -> None:
        words = np.random.default_rng(step).integers(0, 1 << 62, NBYTES // 8)
        self._stager.stage(step, {"w": words}, None)
        self.content[step] = crc64(words.tobytes())

    @property
    def pid(self) -> int:
        process = self.uploads._process
        assert process is not None
        return process.pid

    def told(self, step: int) -> ShardUploaded | None:
        found = [f for f in self.facts if isinstance(f, ShardUploaded) and f.step == step]
        return found[-1] if found else None


@contextlib.asynccontextmanager
async def _running(node: Node) -> AsyncIterator[None]:
    keeper = asyncio.create_task(node.uploads.run())
    try:
        yield
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper


async def _until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110 - threads and processes make it true
            await asyncio.sleep(0.01)


def _differs(node: Node, pid: int) -> bool:
    return node.pid != pid


def _commit(store: ObjectStore, node: Node, step: int) -> None:
    fact = node.told(step)
    assert fact is not None
    record = UploadRecord(rank=0, index_key=fact.index_key, index_crc64=fact.index_crc64)
    assert commit(store, RUN, step, 1, [record], 1, f"w{step}").committed
    info = store.head(keys.data_key(RUN, step, 1, 0))
    assert info is not None
    assert info.crc64 == node.content[step]


def _steps(store: ObjectStore) -> list[int]:
    return [info.step for info in list_commits(store, RUN)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "RESTART_WAIT_S", 0.05)
    monkeypatch.setattr(kept, "LONGEST_WAIT_S", 0.1)


@pytest.mark.parametrize("points", [EVERY, pytest.param(KINDS, id="kinds")])
def test_a_save_in_flight_goes_on_wherever_its_uploader_is_killed(
    behind: StoreConfig,
    direct: StoreConfig,
    proxy: FaultProxy,
    tmp_path: Path,
    quick: None,
    points: list[Point],
) -> None:
    node, plain = Node(tmp_path, behind), open_store(direct)

    async def story() -> None:
        async with _running(node):
            for step, point in enumerate(points, start=1):
                await _kill_at(point, step, node, plain, proxy)

    asyncio.run(story())
    assert _steps(plain) == list(range(len(points), 0, -1))
    assert not [fact for fact in node.facts if isinstance(fact, UploadFailed)]


async def _kill_at(
    point: Point, step: int, node: Node, plain: ObjectStore, proxy: FaultProxy
) -> None:
    hold = Hold(point.after_server)
    proxy.script(Rule(hold, point.operation, point.key or f"step-{step:012d}", point.skip))
    before = await asyncio.to_thread(_steps, plain)
    node.stage(step)
    await _until(hold.held.is_set)
    os.kill(node.pid, signal.SIGKILL)
    proxy.script()
    hold.release.set()
    assert node.told(step) is None, point.label
    assert await asyncio.to_thread(_steps, plain) == before, f"{point.label}: a half one"
    await _until(partial(node.told, step))
    assert await asyncio.to_thread(plain.open_uploads, "") == (), point.label
    await asyncio.to_thread(_commit, plain, node, step)
    assert await asyncio.to_thread(_steps, plain) == [step, *before], point.label


def test_an_uploader_killed_right_after_its_report_sends_nothing_twice(
    behind: StoreConfig, direct: StoreConfig, proxy: FaultProxy, tmp_path: Path, quick: None
) -> None:
    node, plain = Node(tmp_path, behind), open_store(direct)

    async def story() -> None:
        async with _running(node):
            for step in range(1, 4):
                node.stage(step)
                await _until(partial(node.told, step))
                pid = node.pid
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(_commit, plain, node, step)
                await _until(partial(_differs, node, pid))

    asyncio.run(story())
    assert _steps(plain) == [3, 2, 1]
    assert proxy.operations().count("UploadPart") == 3 * PARTS
    assert plain.open_uploads("") == ()


@pytest.mark.parametrize(
    "points",
    [
        EVERY,
        pytest.param([KINDS[2], Point("UploadPart", after_server=True, skip=1)], id="parts"),
    ],
)
def test_an_s3_server_killed_at_any_point_gets_the_whole_when_it_is_back(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, points: list[Point]
) -> None:
    (tmp_path / "s3").mkdir()
    (tmp_path / "node").mkdir()
    with S3Server(tmp_path / "s3") as server, FaultProxy(server.url) as proxy:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        config = StoreConfig(url=server.store_url, endpoint_url=proxy.url, region="us-east-1")
        node, plain = Node(tmp_path / "node", config), open_store(config)

        async def story() -> None:
            async with _running(node):
                for step, point in enumerate(points, start=1):
                    hold = Hold(point.after_server)
                    key = point.key or f"step-{step:012d}"
                    proxy.script(Rule(hold, point.operation, key, point.skip))
                    node.stage(step)
                    await _until(hold.held.is_set)
                    await asyncio.to_thread(server.kill)
                    proxy.script()
                    hold.release.set()
                    server.__enter__()  # it dies with the thread that starts it: this one
                    proxy.retarget(server.url)
                    await _until(partial(node.told, step))
                    await asyncio.to_thread(_commit, plain, node, step)

        asyncio.run(story())
        assert _steps(plain) == list(range(len(points), 0, -1))
        assert plain.open_uploads("") == ()
