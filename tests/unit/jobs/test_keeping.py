"""The job with the real Checkpointer: slots, arenas and a restore from memory."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from checkpointing import slot
from checkpointing.commit import UploadRecord, commit
from checkpointing.content import content_sha256
from checkpointing.stage.arena import peek
from checkpointing.store.base import StoreConfig, open_store
from tests.ports import held_port

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]
FLAGS = ["--preset", "tiny", "--steps", "8", "--plain"]


def rank_env(folder, rank, world, port, attempt, restore):
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "EVERSTEP_RUN": "test",
        "EVERSTEP_ATTEMPT": str(attempt),
        "EVERSTEP_NODE": "node-0",
        "EVERSTEP_SLOT": str(folder / f"slot-{rank}"),
        "EVERSTEP_ARENA": str(folder / f"arena-{rank}"),
        "EVERSTEP_STORE": json.dumps({"url": (folder / "store").as_uri()}),
        "EVERSTEP_RESTORE": json.dumps(restore),
        "EVERSTEP_OUTPUT": str(folder / "out"),
        "EVERSTEP_STEP_TIMEOUT_S": "60",
    }


@contextmanager
def slot_view(path, control):
    slot.create(path)
    view = slot.SlotView(path)
    view.set_control(control)
    try:
        yield view
    finally:
        view.close()


def run_attempt(folder, *, attempt=1, restore=None, world=2, **control):
    """Run all ranks of one attempt; return the last heartbeat of each."""
    folder.mkdir(exist_ok=True)
    with held_port() as port, ExitStack() as stack:
        asked = slot.Control(interval_steps=100, **control)
        views = [
            stack.enter_context(slot_view(folder / f"slot-{rank}", asked)) for rank in range(world)
        ]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "jobs.moe", *FLAGS],
                cwd=folder,
                env=rank_env(folder, rank, world, port, attempt, restore),
            )
            for rank in range(world)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        assert [rank.wait(timeout=100) for rank in ranks] == [0] * world
        return [view.read() for view in views]


def test_stopped_and_restored_run_ends_in_the_bits_of_the_undisturbed_one(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    beats = run_attempt(whole)
    assert [(beat.step, beat.phase) for beat in beats] == [(8, slot.Phase.FINISH)] * 2
    assert beats[0].tokens == 8 * 2 * 2 * 32
    assert beats[0].loss == beats[1].loss > 0

    stopped = run_attempt(parts, stop_step=5)
    assert [beat.step for beat in stopped] == [5, 5]
    assert not (parts / "out" / "final.json").exists()
    assert peek(parts / "arena-1")[0].step == 5

    run_attempt(parts, attempt=2, restore={"step": 5, "attempt": 1, "source": "memory"})
    lines = (parts / "out" / "metrics.jsonl").read_text().splitlines()
    assert [(json.loads(x)["attempt"], json.loads(x)["step"]) for x in lines] == [
        *((1, step) for step in range(1, 6)),
        *((2, step) for step in range(6, 9)),
    ]
    final, expected = (
        json.loads((folder / "out" / "final.json").read_text()) for folder in (parts, whole)
    )
    assert final == expected


def upload_and_commit(folder, step, world):
    """Upload what the arenas hold with the real uploader, and commit it."""
    (folder / "store").mkdir()
    config = StoreConfig(url=(folder / "store").as_uri())
    command = [sys.executable, "-m", "checkpointing.uploader", "--dir", str(folder)]
    command += ["--store", config.to_json(), "--run", "test"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as uploader:
        try:
            lines = (json.loads(line) for line in uploader.stdout)
            reports = (event for event in lines if event["event"] != "alive")
            events = [next(reports) for _ in range(world)]
        finally:
            uploader.terminate()
    uploads = [
        UploadRecord(rank=e["rank"], index_key=e["index_key"], index_crc64=e["index_crc64"])
        for e in events
    ]
    store = open_store(config)
    assert commit(store, "test", step, 1, uploads, world, "once").committed
    return store


def test_sums_in_the_final_file_are_those_of_the_committed_checkpoint(tmp_path):
    run_attempt(tmp_path)
    final = json.loads((tmp_path / "out" / "final.json").read_text())
    sums = content_sha256(upload_and_commit(tmp_path, 8, 2), "test", 8)
    assert final["sha256"] == {name: sums[name] for name in ("weights", "optimizer")}
