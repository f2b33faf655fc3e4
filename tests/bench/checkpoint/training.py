"""A transformer with AdamW whose state is spread over the ranks, and its training loop."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

_BYTES_PER_PARAMETER = 12  # fp32 weight and two moments
_EMBEDDED = 0.15


class Block(nn.Module):
    """What a transformer layer has to multiply, without attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(torch.tanh(q * k) * v)
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """As many layers as it takes, and an embedding that fills up the rest."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        dim = 768 if parameters > 3 * 12 * 768**2 else 256
        block = 12 * dim**2 + 4 * dim
        count = max(1, int((1 - _EMBEDDED) * parameters) // block)
        self.embedding = nn.Embedding(max(16, (parameters - count * block) // dim), dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(count))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Training:
    """This rank's part of a training whose state takes `nbytes` on it.

    Args:
        nbytes: Bytes of this rank's shard of weights and moments.
        tokens: In a batch.
    """

    def __init__(self, nbytes: int, tokens: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{os.environ['BENCH_RENDEZVOUS']}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(self.rank)
        self._tokens = tokens
        self.model = Model(nbytes // _BYTES_PER_PARAMETER)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.step(0.0)  # makes the moments
        self.locals: dict[str, torch.Tensor] = {}
        self.state = self._state()

    def step(self, flag: float) -> float:
        """Train a step; returns the sum of all ranks' flags, which travel with the loss."""
        ids = torch.randint(self.model.embedding.num_embeddings, (self._tokens,))
        loss = self.model(ids)
        loss.backward()
        shared = torch.tensor([float(loss.detach()), flag])
        dist.all_reduce(shared)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(shared[1])

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shard."""
        return sum(tensor.nbytes for tensor in self.locals.values())

    def _state(self) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (self.world,))

        def shard(name: str, local: torch.Tensor) -> DTensor:
            self.locals[name] = local.detach()
            return DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False)

        model, moments = {}, {}
        for name, parameter in self.model.named_parameters():
            model[name] = shard(name, parameter)
            kept = self.optimizer.state[parameter]
            moments[name] = {
                "exp_avg": shard(f"{name}/1", kept["exp_avg"]),
                "exp_avg_sq": shard(f"{name}/2", kept["exp_avg_sq"]),
                "step": kept["step"],
            }
        return {"model": model, "optimizer": moments, "steps": 1}


def together() -> float:
    """Wait for all ranks, and return the time."""
    dist.barrier()
    return time.perf_counter()
