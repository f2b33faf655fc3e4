"""The training script that all launchers run: DDP and AdamW on a small model, gloo, made-up data.

    python script.py FOLDER STEP_S

Rank 0 appends every finished step to FOLDER/steps, with the time, so that a recovery is measured
the same way whoever does it: the first step of ranks that were not there before the fault. Every
rank notes in FOLDER/ranks who it is, for whoever is to kill it. The three lines with `ck` are all
that everstep asks for; other launchers start the script without everstep around it, and then they
do nothing. The other launchers save nothing, so they restore nothing either: in their favour.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

IMPORTING_AT = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from checkpointing import Checkpointer  # noqa: E402

STEPS = 1_000_000
WIDTH = 256
LAYERS = 3
BATCH = 8


def main(folder: Path, step_s: float) -> None:
    marks = {"import": IMPORTING_AT, "main": time.time()}
    torch.set_num_threads(1)
    ck = Checkpointer.from_env()
    dist.init_process_group("gloo")
    marks["rendezvous"] = time.time()
    rank = dist.get_rank()
    life = f"{socket.gethostname()}/{os.getpid()}/{IMPORTING_AT}"
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model)
    marks["ddp"] = time.time()
    start = ck.restore({"model": model, "optimizer": optimizer})
    marks["restore"] = time.time()
    for step in range(start, STEPS):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        x = torch.randn(BATCH, WIDTH, generator=generator)
        loss = ddp(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(step_s)  # the rest of a step is the accelerator's, not this machine's CPUs'
        if rank == 0:
            append(folder / "steps", {"life": life, "step": step + 1, "at": time.time()})
        if step == start:
            marks["first step"] = time.time()
            space = str(Path("/proc/self/ns/pid").readlink())
            me = {"life": life, "rank": rank, "pid": os.getpid(), "pids_of": space, "marks": marks}
            append(folder / "ranks", me)
        ck.step(step + 1, {"model": model, "optimizer": optimizer})


def append(path: Path, value: dict[str, Any]) -> None:
    """Add a line with one write, so that lines of several processes never mix."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, json.dumps(value).encode() + b"\n")
    os.close(handle)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
