"""Behind a line of 5 MB/s a save costs the copy into memory and nothing else."""

import asyncio
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from checkpointing import keys
from checkpointing.checksum import crc64
from checkpointing.stage.arena import MappedArena, UploadState
from checkpointing.stage.stager import Stager
from checkpointing.store.base import StoreConfig, open_store
from tests.faults.proxy import FaultProxy, Rule, Throttle
from tests.faults.test_killed_uploader import NBYTES, Node, _running, _until

pytestmark = [pytest.mark.s3, pytest.mark.slow, pytest.mark.timeout(300)]
SAVES = 4


def timed(stager: Stager, step: int) -> float:
    words = np.full(NBYTES // 8, step)
    begun = time.perf_counter()
    stager.stage(step, {"w": words}, None)
    return time.perf_counter() - begun


def alone(path: Path) -> float:
    """Return the seconds of a save when nobody uploads."""
    stager, took = Stager(path, attempt=1, rank=0, world=1), []
    for step in range(1, SAVES + 2):
        took.append(timed(stager, step))
        arena = MappedArena(path)
        for staged in arena.staged():
            arena.headers[staged.index].mark(staged.sequence, UploadState.UPLOADED)
        arena.close()
    return statistics.median(took[1:])


def test_a_save_waits_for_no_upload(
    behind: StoreConfig, direct: StoreConfig, proxy: FaultProxy, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "node").mkdir()
    copy_s = alone(tmp_path / "alone" / "arena-0")
    node = Node(tmp_path / "node", behind)
    proxy.script(Rule(Throttle(5e6), times=10**6))
    took: list[float] = []
    skipped = 0

    async def story() -> None:
        nonlocal skipped
        async with _running(node):
            async with asyncio.timeout(200):
                while len(took) < SAVES:
                    if node._stager.has_room():
                        took.append(await asyncio.to_thread(timed, node._stager, len(took) + 1))
                    else:
                        skipped += 1
                    await asyncio.sleep(0.05)
            await _until(partial(node.told, 2))
            proxy.script()

    asyncio.run(story())
    sent = node.told(1)
    assert sent is not None
    assert sent.cost is not None
    assert skipped > 2 * SAVES, "the line is what is slow"
    stall_s = statistics.median(took[1:])  # the first one makes the file
    assert stall_s < 3 * copy_s
    assert stall_s < sent.cost.sent_s / 10
    plain = open_store(direct)
    info = plain.head(keys.data_key("r", 2, 1, 0))
    assert info is not None
    assert info.crc64 == crc64(np.full(NBYTES // 8, 2).tobytes())
    assert plain.open_uploads("") == ()
