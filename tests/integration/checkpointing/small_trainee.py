"""The same without torch, so that it starts in no time: arrays, and an object with a state."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing import Checkpointer


class Momentum:
    """Has no state before its first step, as most optimizers."""

    def __init__(self) -> None:
        self.velocity: dict[str, Any] = {}
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"velocity": self.velocity, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.velocity, self.count = state["velocity"], state["count"]


def main() -> None:
    steps, side, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rank = int(os.environ["RANK"])
    model = {"w": np.ones((side, side), np.float32), "b": np.zeros(side), "seen": 0}
    optimizer = Momentum()
    own = {"place": np.zeros(3), "history": []}
    state = {"model": model, "optimizer": optimizer}

    ck = Checkpointer.from_env()
    start = ck.restore(state, lambda: own)
    for step in range(start, steps):
        noise = np.random.default_rng(step).random(side)
        velocity = optimizer.velocity.setdefault("w", np.zeros((side, side), np.float32))
        velocity *= np.float32(0.9)
        velocity += noise.astype(np.float32)
        optimizer.count += 1
        model["w"] -= velocity
        model["b"] += noise
        model["seen"] += 1
        own["place"] += rank
        own["history"].append(step)
        if os.environ.get("POISON_RANK") == str(rank):
            velocity[0, 0] += 1
        ck.step(step + 1, lambda: state, own, loss=float(noise[0]), tokens=4 * (step + 1))
        if ck.should_stop:
            steps = step + 1
            break
    ck.finish(steps, state, own)
    result = {
        "start": start,
        "w": model["w"].tobytes().hex()[:256],
        "b": model["b"].tolist()[:16],
        "velocity": optimizer.velocity["w"].tobytes().hex()[:256] if optimizer.velocity else "",
        "count": [optimizer.count, model["seen"]],
        "own": [own["place"].tolist(), own["history"]],
    }
    (out / f"rank-{rank}.json").write_text(json.dumps(result))


main()
