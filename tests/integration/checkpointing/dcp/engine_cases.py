"""What the ranks do that keep a sharded training by the engine's own path, without DCP."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpointing.commit import UploadRecord, commit
from checkpointing.restore import Point, restore_from_memory, restore_from_store
from checkpointing.stage.arena import MappedArena
from checkpointing.stage.stager import Stager
from checkpointing.store.directory import DirectoryStore
from checkpointing.uploader.send import send
from tests.integration.checkpointing.dcp.states import Training, mesh_of, sums

RUN = "run"
STEP = 7


def stage(folder: str, state: Any) -> None:
    """Stage on every rank, upload, commit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = DirectoryStore(Path(folder))
    arena = Path(folder) / f"arena-{rank}"
    Stager(arena, attempt=1, rank=rank, world=world).stage(STEP, state, {"seed": rank})
    mapped = MappedArena(arena)
    sent = send(store, RUN, mapped, mapped.staged()[0])
    mapped.close()
    record = UploadRecord(rank=rank, index_key=sent.index_key, index_crc64=sent.index_crc64)
    records: list[Any] = [None] * world
    dist.all_gather_object(records, record)
    if rank == 0:
        assert commit(store, RUN, STEP, 1, records, world, "w").committed
    dist.barrier()


def restore(folder: str, state: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    point = Point(step=STEP, attempt=1)
    restore_from_store(DirectoryStore(Path(folder)), RUN, point, rank, world, state, None)


def state_of(training: Training) -> dict[str, Any]:
    return {"model": training.model, "optimizer": training.optimizer, "epoch": [3]}


def save_training(folder: str, layout: str) -> dict[str, str]:
    training = Training(layout, seed=4)
    stage(folder, state_of(training))
    return training.sums()


def restore_training(folder: str, layout: str, steps: int) -> dict[str, str]:
    """Restore into a training that went another way, or has not begun: an empty optimizer."""
    training = Training(layout, seed=99, steps=steps)
    state = state_of(training)
    state["epoch"][0] = 0
    restore(folder, state)
    assert state["epoch"] == [3]
    return training.sums()


def train_on(folder: str, layout: str) -> list[dict[str, str]]:
    """Train on after a restore and without one."""
    ways = []
    straight = Training(layout, seed=4)
    stage(folder, state_of(straight))
    resumed = Training(layout, seed=99, steps=0)
    restore(folder, state_of(resumed))
    for training in (straight, resumed):
        for step in range(3):
            torch.manual_seed(step)
            training.model(torch.randn(4, 6)).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        ways.append(training.sums())
    return ways


def restore_from_arena(folder: str, layout: str) -> tuple[dict[str, str], dict[str, str]]:
    training = Training(layout, seed=4)
    stage(folder, state_of(training))
    other = Training(layout, seed=99, steps=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    arena = Path(folder) / f"arena-{rank}"
    own: dict[str, Any] = {"seed": -1}
    point = Point(step=STEP, attempt=1)
    restore_from_memory(arena, point, rank, world, state_of(other), own)
    assert own == {"seed": rank}
    return training.sums(), other.sums()


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Shapes that no mesh divides, empty ones, one with fewer rows than ranks, and a large one."""
    g = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(7, 5, generator=g),
        "few": torch.randn(3, generator=g),
        "none": torch.zeros(0, 4),
        "scalar": torch.randn((), generator=g),
        "cube": torch.randn(4, 6, 10, generator=g).to(torch.bfloat16),
        "large": torch.randn(2100, 2100, generator=g),
        "long": torch.arange(2_200_000) * seed,
    }


def spread(values: dict[str, torch.Tensor], plan: list[str]) -> dict[str, Any]:
    """Lay tensors out as a plan of placements on a mesh says."""
    world = dist.get_world_size()
    shape = (2, world // 2) if len(plan) == 2 and world > 1 else (1,) * (len(plan) - 1) + (world,)
    mesh = mesh_of(shape)
    found: dict[str, Any] = {}
    for name, value in values.items():
        places = [
            Replicate() if place == "R" or int(place) >= value.dim() else Shard(int(place))
            for place in plan
        ]
        found[name] = distribute_tensor(value, mesh, places)
    return found


def save_spread(folder: str, plan: list[str]) -> None:
    state = spread(tensors(5), plan) if plan else tensors(5)
    stage(folder, {"t": state})


def restore_spread(folder: str, plan: list[str]) -> None:
    values = {name: torch.zeros_like(value) for name, value in tensors(5).items()}
    state = {"t": spread(values, plan) if plan else values}
    restore(folder, state)
    assert sums(state["t"]) == sums(tensors(5))
    assert not plan or isinstance(state["t"]["rows"], DTensor)


def restore_on_some(folder: str) -> list[str]:
    """A DTensor on a mesh of two ranks of four: the others have nothing of it."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [1, 2])
    value = torch.arange(12.0).reshape(6, 2)
    local = _piece(mesh, value)
    spread_out = DTensor.from_local(local, mesh, [Shard(0)], shape=value.shape, stride=(2, 1))
    state = {"t": spread_out, "u": torch.ones(2)}
    stage(folder, {"s": state})
    with torch.no_grad():
        state["t"].to_local().fill_(0)
    restore(folder, {"s": state})
    return [str(state["t"].to_local().flatten().tolist())]


def _piece(mesh: Any, value: torch.Tensor) -> torch.Tensor:
    coordinate = mesh.get_coordinate()
    return value.chunk(2)[coordinate[0]].clone() if coordinate else torch.empty(0, 2)


def save_state_dicts(folder: str, layout: str) -> dict[str, str]:
    """Save plain state dicts, as DCP would be given them."""
    training = Training(layout, seed=4)
    stage(folder, training.state())
    return training.sums()
