"""As short_job.py, but it saves numpy state: python short_saving_job.py STEPS SECONDS_A_STEP."""

import os
import sys
import time
from pathlib import Path

import numpy as np

from checkpointing import Checkpointer


def note(word: str) -> None:
    folder = Path(os.environ["EVERSTEP_OUTPUT"])
    folder.mkdir(parents=True, exist_ok=True)
    line = f"{word} {os.environ['EVERSTEP_ATTEMPT']} {os.environ['RANK']} {os.getpid()}\n"
    with (folder / "notes").open("a") as file:
        file.write(line)


note("start")
steps, step_s = int(sys.argv[1]), float(sys.argv[2])
state = {"model": {"weights": np.zeros(1000)}, "steps": {"done": 0}}
checkpointer = Checkpointer.from_env()
start = checkpointer.restore(state)
for step in range(start, steps):
    time.sleep(step_s)
    state["model"]["weights"] += step
    state["steps"]["done"] = step + 1
    checkpointer.step(step + 1, state, loss=float(steps - step), tokens=8 * (step + 1))
    if checkpointer.should_stop:
        note("stop")
        sys.exit()
checkpointer.finish(steps, state)
assert state["model"]["weights"][0] == steps * (steps - 1) / 2
note("end")
