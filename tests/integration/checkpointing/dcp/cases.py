"""What the ranks of these tests do; runs in their processes."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from checkpointing.dcp import EverstepReader, EverstepStager, EverstepWriter
from tests.integration.checkpointing.dcp.states import Training, blank, nested, sums

ENGINES = ("everstep", "torch")


def writer(engine: str, folder: str, **options: Any) -> Any:
    if engine == "torch":
        return dcp.FileSystemWriter(folder)
    return EverstepWriter(folder, **options)


def reader(engine: str, folder: str, **options: Any) -> Any:
    return dcp.FileSystemReader(folder) if engine == "torch" else EverstepReader(folder, **options)


def save_training(engine: str, folder: str, layout: str, seed: int) -> dict[str, str]:
    training = Training(layout, seed)
    dcp.save(training.state(), storage_writer=writer(engine, folder))
    return training.sums()


def load_training(engine: str, folder: str, layout: str) -> dict[str, str]:
    training = Training(layout, seed=99, steps=1)
    state = training.state()
    dcp.load(state, storage_reader=reader(engine, folder))
    training.take(state)
    return training.sums()


def save_nested(engine: str, folder: str, seed: int) -> dict[str, str]:
    state = nested(seed)
    dcp.save(state, storage_writer=writer(engine, folder))
    return sums(state)


def load_nested(engine: str, folder: str) -> dict[str, str]:
    state = blank(nested(1))
    dcp.load(state, storage_reader=reader(engine, folder))
    return sums(state)


def load_subset(
    engine: str, folder: str, drop: list[str], add: list[str], partial: bool
) -> dict[str, str] | str:
    """Load with some keys left out and some that were never saved; the error's root as text."""
    state = blank(nested(1))
    for key in drop:
        del state[key]
    for key in add:
        state[key] = torch.full((2,), 7.0)
    try:
        dcp.load(
            state,
            storage_reader=reader(engine, folder),
            planner=DefaultLoadPlanner(allow_partial_load=partial),
        )
    except dcp.api.CheckpointException as error:
        failure = error.failures[dist.get_rank()][0]
        return f"{type(failure).__name__}: {failure}"
    return sums(state)


def load_model_alone(engine: str, folder: str, layout: str) -> dict[str, str]:
    """Load the model of a training into one that has a part more, not strictly."""
    training = Training(layout, seed=99, steps=1)
    before = training.sums()
    state = {"model": get_model_state_dict(training.model)}
    state["model"]["added.weight"] = torch.full((3,), 7.0)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=reader(engine, folder), planner=planner)
    options = StateDictOptions(strict=False)
    answer = set_model_state_dict(training.model, state["model"], options=options)
    after = training.sums()
    changed = {name: sum_ for name, sum_ in after.items() if before[name] != sum_}
    return {**changed, "unexpected": str(answer.unexpected_keys)}


def save_async(engine: str, folder: str, layout: str, mode: str, stager: bool) -> dict[str, Any]:
    """Save in the background while training goes on; return what was to be saved."""
    training = Training(layout, seed=3)
    state = {**training.state(), "nested": nested(5)}
    wanted = sums(state)
    own = EverstepStager(process=mode == "PROCESS") if stager else None
    future = dcp.async_save(
        state,
        storage_writer=writer(engine, folder),
        async_stager=own,
        async_checkpointer_type=AsyncCheckpointerType[mode],
    )
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.fill_(123.0)  # must not be seen by the save
        state["nested"]["transposed"].fill_(5)
        state["nested"]["groups"][0]["lr"] = 7
    future = getattr(future, "upload_completion", future)
    future.result(timeout=90)
    return wanted


def load_async(engine: str, folder: str, layout: str) -> dict[str, str]:
    training = Training(layout, seed=99, steps=1)
    state = {**training.state(), "nested": blank(nested(1))}
    dcp.load(state, storage_reader=reader(engine, folder))
    return sums(state)


def save_some(engine: str, folder: str, seed: int, fail_rank: int = -1) -> str:
    """Save a sharded state; one rank cannot upload."""
    training = Training("fsdp", seed)
    own = writer(engine, folder)
    if dist.get_rank() == fail_rank:
        own._location = _Broken(own._location)
    try:
        dcp.save(training.state(), storage_writer=own)
    except dcp.api.CheckpointException as error:
        return ", ".join(
            f"{rank}: {type(failure[0]).__name__}" for rank, failure in error.failures.items()
        )
    return "saved"


class _Broken:
    """A location whose store takes nothing."""

    def __init__(self, location: Any) -> None:
        self.url = location.url

    def open(self, *, make: bool = False) -> Any:
        from checkpointing.errors import StoreUnavailable

        raise StoreUnavailable("503 SlowDown")


def count_gets(folder: str, seed: int) -> tuple[int, int]:
    """Load and count how often this rank fetched documents and listed."""
    from checkpointing.store.directory import DirectoryStore

    got: list[str] = []
    listed: list[str] = []
    get, list_ = DirectoryStore.get, DirectoryStore.list

    def counted_get(self: Any, key: str) -> bytes:
        got.append(key)
        return get(self, key)

    def counted_list(self: Any, prefix: str) -> Any:
        listed.append(prefix)
        return list_(self, prefix)

    DirectoryStore.get, DirectoryStore.list = counted_get, counted_list  # type: ignore[method-assign]
    try:
        load_training("everstep", folder, "fsdp")
    finally:
        DirectoryStore.get, DirectoryStore.list = get, list_  # type: ignore[method-assign]
    return len(got), len(listed)


def folder_of(base: Path, *parts: str) -> str:
    return os.fspath(base.joinpath(*parts))


def pass_on(source: str, target: str, layout: str) -> None:
    """Load and save again."""
    training = Training(layout, seed=98, steps=1)
    state = training.state()
    dcp.load(state, storage_reader=EverstepReader(source))
    dcp.save(state, storage_writer=EverstepWriter(target))


def background_save(engine: str, folder: str, value: float, stager: Any = None) -> str:
    """Save in process mode; how it ended."""
    try:
        future = dcp.async_save(
            {"a": torch.full((4,), value)},
            storage_writer=writer(engine, folder),
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        getattr(future, "upload_completion", future).result(timeout=90)
    except Exception as error:  # noqa: BLE001 - the answer
        return type(error).__name__
    return "saved"


def daemon() -> Any:
    from torch.distributed.checkpoint import _async_process_executor

    return _async_process_executor._CHECKPOINT_PROCESS


def signal_daemon(number: int) -> None:
    """Rank 1's background process gets a signal; all ranks know that it did."""
    if dist.get_rank() == 1:
        process = daemon()._save_process
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.join(10)
    dist.barrier()


def save_around_a_killed_daemon(engine: str, folder: str = "") -> list[str]:
    place = folder or tempfile.mkdtemp()
    stager = EverstepStager(process=True) if engine == "everstep" else None
    outcomes = [background_save(engine, place, 1.0, stager)]
    signal_daemon(signal.SIGKILL)
    return outcomes + [background_save(engine, place, 2.0 + n, stager) for n in range(3)]


def save_around_a_frozen_daemon(folder: str) -> list[str]:
    stager = EverstepStager(process=True, deadline_s=3.0)
    # One of another test has another deadline: this one makes its own.
    if daemon() is not None:
        daemon()._save_process.kill()
        daemon()._save_process.join(10)
    outcomes = [background_save("everstep", folder, 1.0, stager)]
    for number in (signal.SIGSTOP, None):
        if number is not None:
            signal_daemon(number)
        outcomes.append(background_save("everstep", folder, 2.0, stager))
    return outcomes


def two_quick_saves(folder: str) -> tuple[bool, str, str]:
    stager = EverstepStager(process=True)
    stager.warm_up()
    ready = daemon() is not None
    futures = [
        dcp.async_save(
            {"a": torch.full((4,), float(n))},
            storage_writer=EverstepWriter(f"{folder}/{n}"),
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        for n in range(2)
    ]
    for future in futures:
        getattr(future, "upload_completion", future).result(timeout=90)
    return ready, "saved", "saved"


def restore_run(folder: str, run: str, step: int, layout: str) -> dict[str, str]:
    """Restore a migrated checkpoint by the engine's own path."""
    from checkpointing.restore import Point, restore_from_store
    from checkpointing.store.directory import DirectoryStore

    training = Training(layout, seed=99, steps=1)
    state = training.state()
    rank, world = dist.get_rank(), dist.get_world_size()
    point = Point(step=step, attempt=1)
    restore_from_store(DirectoryStore(Path(folder)), run, point, rank, world, state, None)
    training.take(state)
    return training.sums()


def load_run(folder: str, run: str, layout: str) -> dict[str, str]:
    """Load what the engine saved through DCP."""
    training = Training(layout, seed=99, steps=1)
    state = training.state()
    dcp.load(state, storage_reader=EverstepReader(folder, run=run))
    training.take(state)
    return training.sums()


def with_environment(environment: dict[str, str], case: str, url: str, *args: Any) -> Any:
    os.environ |= environment
    return globals()[case]("everstep", url, *args)


def keep_own_folder(base: str) -> None:
    """Keep a folder that this rank alone has, with a file that all have."""
    from checkpointing.dcp import keep

    rank = dist.get_rank()
    folder = Path(base) / f"node-{rank}"
    folder.mkdir()
    (folder / "shared").write_bytes(b"all")
    (folder / f"rank-{rank}").write_bytes(b"%d" % rank)
    keep(folder, Path(base) / "kept")
