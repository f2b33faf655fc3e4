"""A fresh process restores an optimizer that has not taken a step yet."""

import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing import Checkpointer
from checkpointing.optimizer_state import create_missing
from checkpointing.tree import flatten
from tests.unit.checkpointing.ranks import Rank

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A process group of one, so that there are DTensors."""
    import torch.distributed as dist

    file = tmp_path / f"group-{secrets.token_hex(4)}"
    dist.init_process_group("gloo", init_method=file.as_uri(), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make(mesh: Any, seed: int, **options: Any) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model[1].bias.requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()


def content(model: Any, optimizer: Any) -> list[bytes]:
    flat = flatten({"model": model, "optimizer": optimizer})
    found = []
    for leaf in flat.leaves.values():
        local = leaf.to_local() if hasattr(leaf, "to_local") else leaf
        found.append(local.detach().numpy().tobytes())
    return [*found, repr(flat.skeleton).encode()]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"lr": None}])
def test_a_fresh_sharded_process_restores_model_and_optimizer(
    tmp_path: Path, alone: Any, options: dict[str, Any]
) -> None:
    if "lr" in options:  # a learning rate that is a tensor
        model, optimizer = make(alone, 0)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    else:
        model, optimizer = make(alone, 0, **options)
    rank = Rank(tmp_path)
    ck = Checkpointer.from_env(rank.environ())
    ck.restore({"model": model, "optimizer": optimizer})
    train(model, optimizer)
    ck.step(1, {"model": model, "optimizer": optimizer})
    other, fresh = make(alone, 7, **{k: v for k, v in options.items() if k != "lr"})
    if "lr" in options:
        fresh.param_groups[0]["lr"] = torch.tensor(0.1)
    again = Checkpointer.from_env(rank.from_memory(1))
    assert again.restore({"model": other, "optimizer": fresh}) == 1
    assert content(other, fresh) == content(model, optimizer)
    train(model, optimizer)
    train(other, fresh)
    assert content(other, fresh) == content(model, optimizer)


def test_nothing_but_the_state_is_left_of_its_creation(alone: Any) -> None:
    model, optimizer = make(alone, 0, weight_decay=0.5)
    saved = make(alone, 1)
    train(*saved)
    skeleton = flatten({"optimizer": saved[1]}).skeleton
    kept = [p.detach().clone() for p in model.parameters()]
    gradient = torch.full_like(model[0].weight, 3.0)
    model[0].weight.grad = gradient
    numbers = torch.get_rng_state()
    create_missing({"optimizer": optimizer}, skeleton)
    assert len(optimizer.state) == 3, "not of the frozen one"
    assert model[0].weight.grad is gradient
    assert model[1].weight.grad is None
    assert torch.equal(torch.get_rng_state(), numbers)
    assert optimizer.param_groups[0]["lr"] == 0.1
    pairs = zip(kept, model.parameters(), strict=True)
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def test_what_is_whole_everywhere_is_left_to_the_optimizer() -> None:
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    skeleton = flatten({"optimizer": optimizer}).skeleton
    fresh = torch.optim.AdamW(torch.nn.Linear(3, 3).parameters())
    create_missing({"optimizer": fresh}, skeleton)
    assert not fresh.state
    before_the_first_step = flatten({"optimizer": fresh}).skeleton
    create_missing({"optimizer": fresh}, before_the_first_step)
    assert not fresh.state
