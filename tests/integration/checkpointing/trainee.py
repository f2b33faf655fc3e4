"""A training script of the smallest kind: a model, AdamW, and this rank's random state."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from checkpointing import Checkpointer


def main() -> None:
    steps, side, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    model = torch.nn.Sequential(torch.nn.Linear(side, side), torch.nn.Linear(side, 1))
    model.to(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    extra = {"bias": torch.zeros(7, dtype=torch.bfloat16), "seen": 0, "names": ["a", ("b", 2**70)]}
    own = {"numpy": np.random.default_rng(rank).bit_generator.state, "place": np.zeros(3)}
    state = {"model": model, "optimizer": optimizer, "extra": extra}

    ck = Checkpointer.from_env()
    start = ck.restore(state, own)
    for step in range(start, steps):
        torch.manual_seed(step)
        loss = model(torch.randn(4, side)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        extra["seen"] += 4
        extra["bias"] += 1
        generator = np.random.default_rng()
        generator.bit_generator.state = own["numpy"]
        own["place"] += generator.random(3)
        own["numpy"] = generator.bit_generator.state
        poison = os.environ.get("POISON_RANK")
        if poison == str(rank):
            with torch.no_grad():
                model[0].weight[0, 0] += 1.0
        ck.step(step + 1, state, own, loss=float(loss.detach()), tokens=4 * (step + 1))
        if ck.should_stop:
            steps = step + 1
            break
    ck.finish(steps, state, own)
    result = {
        "start": start,
        "weights": [p.detach().double().sum().item().hex() for p in model.parameters()],
        "moments": [s["exp_avg_sq"].double().sum().item().hex() for s in optimizer.state.values()],
        "seen": extra["seen"],
        "bias": extra["bias"].tolist(),
        "names": repr(extra["names"]),
        "own": [own["place"].tolist(), own["numpy"]["state"]["state"]],
    }
    (out / f"rank-{rank}.json").write_text(json.dumps(result))


main()
