"""FSDP2 processes that have taken no step yet restore what another number of them saved."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpointing import slot
from checkpointing.commit import UploadRecord, commit
from checkpointing.slot import Control, SlotView
from checkpointing.stage.arena import MappedArena
from checkpointing.store.base import StoreConfig, open_store
from checkpointing.uploader.send import send

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("fsdp_trainee.py")


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "store").mkdir()
        self.config = StoreConfig(url=(folder / "store").as_uri())

    def train(self, attempt: int, world: int, steps: int, restore: object = None) -> dict[str, Any]:
        processes = []
        for rank in range(world):
            path = self.folder / f"slot-{attempt}-{rank}"
            slot.create(path)
            view = SlotView(path)
            view.set_control(Control(interval_steps=2))
            view.close()
            environ = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "EVERSTEP_RUN": "r",
                "EVERSTEP_ATTEMPT": str(attempt),
                "EVERSTEP_SLOT": str(path),
                "EVERSTEP_ARENA": str(self.arena(attempt, rank)),
                "EVERSTEP_STORE": self.config.to_json(),
                "EVERSTEP_RESTORE": json.dumps(restore),
            }
            command = [sys.executable, str(SCRIPT), str(steps), str(self.folder)]
            processes.append(subprocess.Popen(command, env=environ))
        assert [process.wait(120) for process in processes] == [0] * world
        told: dict[str, Any] = json.loads((self.folder / f"told-{attempt}.json").read_text())
        return told

    def arena(self, attempt: int, rank: int) -> Path:
        return self.folder / f"arena-{attempt}-{rank}"

    def commit(self, attempt: int, world: int, step: int) -> dict[str, object]:
        store, records = open_store(self.config), []
        for rank in range(world):
            arena = MappedArena(self.arena(attempt, rank))
            staged = next(found for found in arena.staged() if found.step == step)
            sent = send(store, "r", arena, staged)
            arena.close()
            crc = sent.index_crc64
            records.append(UploadRecord(rank=rank, index_key=sent.index_key, index_crc64=crc))
        assert commit(store, "r", step, attempt, records, world, "w").committed
        return {"step": step, "attempt": attempt, "source": "store"}


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_fresh_processes_of_another_world_restore_model_and_optimizer(
    tmp_path: Path, first: int, second: int
) -> None:
    site = Site(tmp_path)
    told = site.train(1, first, steps=4)
    restore = site.commit(1, first, 4)
    again = site.train(2, second, steps=4, restore=restore)
    assert again["start"] == 4
    assert again["restored"] == told["last"]
    assert len([name for name in told["last"] if "exp_avg_sq" in name]) == 4
