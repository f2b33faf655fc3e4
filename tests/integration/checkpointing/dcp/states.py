"""States of training on a few ranks, in all the layouts that torch has for them."""

import copy
import functools
import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

LAYOUTS = ("fsdp", "hsdp", "tp", "fsdp_tp", "plain")
State = dict[str, Any]


class Block(nn.Module):
    """Rows that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)
        self.odd = nn.Linear(6, 7)
        self.few = nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.down(torch.relu(self.up(x))) + x
        return self.few(self.odd(hidden)).sum() * self.scale.sum()


class Training:
    """A model and its optimizer, some steps in."""

    def __init__(self, layout: str, seed: int, steps: int = 2) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = Block()
        shard(self.model, layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        for step in range(steps):
            torch.manual_seed(seed + step)
            self.model(torch.randn(4, 6)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> State:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def take(self, state: State) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def sums(self) -> dict[str, str]:
        return sums(self.state())


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the one mesh of this shape: its groups keep their threads and buffers for good."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model: nn.Module, layout: str) -> None:
    world = dist.get_world_size()
    if layout == "fsdp":
        fully_shard(model, mesh=mesh_of((world,)))
    elif layout == "hsdp":
        shape = (2, world // 2) if world > 1 else (1, 1)
        fully_shard(model, mesh=mesh_of(shape, ("replicate", "shard")))
    elif layout == "tp":
        _tensor_parallel(model, mesh_of((world,)))
    elif layout == "fsdp_tp":
        shape = (world // 2, 2) if world > 1 else (1, 1)
        mesh = mesh_of(shape, ("dp", "tp"))
        _tensor_parallel(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])


def _tensor_parallel(model: nn.Module, mesh: Any) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def nested(seed: int) -> State:
    """All kinds of leaves, on any rank alike."""
    g = torch.Generator().manual_seed(seed)

    def t(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    return {
        "weights": {"deep": {"er": t(40, 3)}, "half": t(7).to(torch.bfloat16)},
        "transposed": t(6, 8).t(),
        "strided": t(9, 9)[::2, 1::3],
        "scalar": t(()),
        "empty": torch.empty(0, 3),
        "ints": torch.arange(5) * seed,
        "flags": torch.arange(5) % 2 == seed % 2,
        "complex": torch.complex(t(3), t(3)),
        "list": [t(3), {"inner": t(2)}, seed],
        "groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.99), "params": [0, 1]}],
        "step": seed,
        "large": 2**80 + seed,
        "name": f"run {seed}",
        "nothing": None,
        "inf": float("inf"),
        "blob": io.BytesIO(b"some bytes %d" % seed),
        "raw": bytes(range(seed)),
        "pair": (torch.ones(2) * seed, "x"),
        "ties": {"a": (tied := t(4, 4)), "b": tied},
    }


def sums(value: Any) -> dict[str, str]:
    """A sum by path, of DTensors over the whole; a collective when there are any."""
    found: dict[str, str] = {}
    _sum(value, "", found)
    return found


def _sum(value: Any, path: str, found: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _sum(value[key], f"{path}/{key}", found)
    elif isinstance(value, list | tuple) and any(
        isinstance(item, torch.Tensor | Mapping | list) for item in value
    ):
        for n, item in enumerate(value):
            _sum(item, f"{path}/{n}", found)
    elif isinstance(value, DTensor):
        _sum(value.detach().full_tensor(), path, found)
    elif isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        head = f"{value.dtype} {tuple(value.shape)} "
        found[path] = head + hashlib.sha256(raw).hexdigest()[:16]
    elif isinstance(value, io.BytesIO):
        found[path] = repr(value.getvalue())
    else:
        found[path] = repr(value)


def blank(state: State) -> State:
    """The same structure with other content."""
    other = copy.deepcopy(state)

    def spoil(value: Any) -> Any:
        if isinstance(value, DTensor):
            with torch.no_grad():
                value.to_local().fill_(7)
            return value
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                return value.fill_(True if value.dtype is torch.bool else 7)
        if isinstance(value, dict):
            return {key: spoil(child) for key, child in value.items()}
        if isinstance(value, list):
            return [spoil(child) for child in value]
        return None

    return {key: spoil(child) for key, child in other.items()}
