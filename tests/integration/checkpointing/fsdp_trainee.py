"""Trains an FSDP2 model a little, or restores it in a fresh process, and tells what it holds."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from checkpointing import Checkpointer


def main() -> None:
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    group = folder / f"group-{os.environ['EVERSTEP_ATTEMPT']}"
    dist.init_process_group("gloo", init_method=group.as_uri(), rank=rank, world_size=world)
    torch.manual_seed(int(os.environ["EVERSTEP_ATTEMPT"]))
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.ReLU(), torch.nn.Linear(9, 5))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    state = {"model": model, "optimizer": optimizer}
    ck = Checkpointer.from_env(overlap=True)
    start = ck.restore(state, {"place": start_of(rank)}, on_other_world="fresh")
    held = content(model, optimizer) if start else {}
    for step in range(start, steps):
        optimizer.zero_grad()
        model(torch.full((4, 7), step + 1.0)).square().mean().backward()
        optimizer.step()
        ck.step(step + 1, state, {"place": start_of(rank)})
    ck.finish(steps, state, {"place": start_of(rank)})
    last = content(model, optimizer)  # every rank gathers
    if rank == 0:
        result = {"start": start, "restored": held, "last": last}
        (folder / f"told-{os.environ['EVERSTEP_ATTEMPT']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def start_of(rank: int) -> torch.Tensor:
    return torch.full((2,), float(rank))


def content(model: Any, optimizer: Any) -> dict[str, str]:
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": whole(tensor) for name, tensor in state.items()}
    return found


def whole(tensor: Any) -> str:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return str(full.detach().numpy().tobytes().hex())


main()
