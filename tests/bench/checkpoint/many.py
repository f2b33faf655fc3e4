"""Saves many small tensors: `python -m tests.bench.checkpoint.many COUNT FOLDER`; see `serve`.

Ours does all of a save: plan, copy, upload to a folder, commit. DCP does only what it does about
the tensors, not the writing of their bytes, which takes it longest: plan, results, `.metadata`.
Of a restore both do what comes before the first byte of a tensor is read.
"""

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from checkpointing import keys
from checkpointing.commit import UploadRecord, commit
from checkpointing.restore import Point, restore_from_store
from checkpointing.stage.arena import MappedArena, UploadState
from checkpointing.stage.stager import Stager
from checkpointing.stage.taking import Taker
from checkpointing.store.directory import DirectoryStore
from checkpointing.uploader.send import send
from tests.bench.checkpoint.children import serve

_MIB = 1 << 20
_ELEMENTS = 16
_STORED = 1577  # bytes that torch.save makes of such a tensor


class Reached(Exception):
    """A restore is where the first byte of a tensor would be read."""


class UntilData(DirectoryStore):
    """Gives documents, and no data."""

    def read_into(self, *_: object) -> None:
        raise Reached

    def read_each(self, *_: object) -> None:
        raise Reached


class WithoutData(FileSystemWriter):
    """Tells of data that it does not write, and when the plan was made."""

    planned_at = 0.0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        self.planned_at = time.perf_counter()
        results = [
            WriteResult(item.index, _STORED, _StorageInfo("__0_0.distcp", n * _STORED, _STORED))
            for n, item in enumerate(plan.items)
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class GlobalPlan(DefaultSavePlanner):
    """Tells how long rank 0 takes to check the plans of all ranks and to make their metadata."""

    global_s = 0.0

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        begun = time.perf_counter()
        made = super().create_global_plan(all_plans)
        self.global_s = time.perf_counter() - begun
        return made


class ReaderUntilData(FileSystemReader):
    """Reads metadata, and no data."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        raise Reached


class Many:
    """The same state for both."""

    def __init__(self, count: int, folder: Path) -> None:
        values = torch.randn(count, _ELEMENTS)
        model = {f"layers.{n}.weight": values[n].clone() for n in range(count)}
        self._state: dict[str, Any] = {"model": model}
        self._folder = folder

    def ours(self) -> dict[str, float]:
        arena, home = self._folder / "arena-0", self._folder / "ours"
        home.mkdir()
        store = UntilData(home)
        begun = time.perf_counter()
        taken = Taker(0, 1).take(self._state, None)
        plan_s = time.perf_counter() - begun
        del taken  # not while it is measured, as with DCP
        begun = time.perf_counter()
        stager = Stager(arena, attempt=1, rank=0, world=1)
        stager.prepare(self._state, None)
        self._save(stager, store, 1)
        first_s = time.perf_counter() - begun
        begun = time.perf_counter()
        phases = self._save(stager, store, 2)
        next_s = time.perf_counter() - begun
        restore_s = self._restore(store)
        arena.unlink()
        shutil.rmtree(home)
        times = {"first_s": first_s, "next_s": next_s, "plan_s": plan_s, "restore_s": restore_s}
        return {**times, **phases}

    def _save(self, stager: Stager, store: DirectoryStore, step: int) -> dict[str, float]:
        """Save; return seconds of each phase and sizes."""
        marks = [time.perf_counter()]
        stager.stage(step, self._state, None)
        marks.append(time.perf_counter())
        arena = MappedArena(self._folder / "arena-0")
        staged = arena.staged()[0]
        sent = send(store, "b", arena, staged)
        arena.headers[staged.index].mark(staged.sequence, UploadState.UPLOADED)
        arena.close()
        marks.append(time.perf_counter())
        record = UploadRecord(rank=0, index_key=sent.index_key, index_crc64=sent.index_crc64)
        assert commit(store, "b", step, 1, [record], 1, "w").committed
        marks.append(time.perf_counter())
        index, manifest = store.head(sent.index_key), store.head(keys.manifest_key("b", step, 1))
        assert index is not None
        assert manifest is not None
        names = ("stage_s", "upload_s", "commit_s")
        phases = {name: marks[n + 1] - marks[n] for n, name in enumerate(names)}
        sizes = {"manifest_mib": manifest.nbytes / _MIB, "index_mib": index.nbytes / _MIB}
        return {**phases, **sizes}

    def _restore(self, store: DirectoryStore) -> float:
        begun = time.perf_counter()
        try:
            restore_from_store(store, "b", Point(step=2, attempt=1), 0, 1, self._state, None)
        except Reached:
            return time.perf_counter() - begun
        raise AssertionError("no tensor was read")

    def dcp(self) -> dict[str, float]:
        SavePlanner._cached_save_plan.clear()
        SavePlanner._cached_all_plans.clear()
        SavePlanner._cached_global_plan.clear()
        SavePlanner._cached_final_save_plan.clear()
        SavePlanner._cached_metadata.clear()
        took, plans, checks, home = [], [], [], self._folder / "dcp"
        for step in (1, 2):
            begun = time.perf_counter()
            writer = WithoutData(home / str(step))
            planner = GlobalPlan(enable_plan_caching=True)
            dcp.save(self._state, storage_writer=writer, planner=planner, no_dist=True)
            took.append(time.perf_counter() - begun)
            plans.append(writer.planned_at - begun)
            checks.append(planner.global_s)
        metadata = (home / "2" / ".metadata").stat().st_size
        restore_s = self._restore_dcp(home / "2")
        shutil.rmtree(home)
        return {
            "first_s": took[0],
            "next_s": took[1],
            "plan_s": plans[0],
            "finish_s": took[1] - plans[1],
            "check_s": checks[0],
            "restore_s": restore_s,
            "metadata_mib": metadata / _MIB,
        }

    def _restore_dcp(self, home: Path) -> float:
        begun = time.perf_counter()
        try:
            dcp.load(self._state, storage_reader=ReaderUntilData(home), no_dist=True)
        except (Reached, dcp.api.CheckpointException):
            return time.perf_counter() - begun
        raise AssertionError("no tensor was read")


def main() -> None:
    many = Many(int(sys.argv[1]), Path(sys.argv[2]))
    serve({"ours": many.ours, "dcp": many.dcp})


if __name__ == "__main__":
    main()
