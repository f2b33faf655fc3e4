"""A plain DistributedDataParallel script: python ddp_plain.py [STEPS] [SLEEP_S]."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.05
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, steps + 1):
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.4f}", flush=True)
        time.sleep(pause_s)
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main()
