"""A job of the smallest kind, without torch: python short_job.py SECONDS [GATE].

It notes its start and its end. With a GATE it ends as soon as a file of that name exists.
"""

import os
import sys
import time
from pathlib import Path


def note(word: str) -> None:
    folder = Path(os.environ["EVERSTEP_OUTPUT"])
    folder.mkdir(parents=True, exist_ok=True)
    line = f"{word} {os.environ['EVERSTEP_ATTEMPT']} {os.environ['RANK']} {os.getpid()}\n"
    with (folder / "notes").open("a") as file:
        file.write(line)


note("start")
end = time.monotonic() + float(sys.argv[1])
gates = [Path(name) for name in sys.argv[2:]]
while time.monotonic() < end and not any(gate.exists() for gate in gates):
    time.sleep(0.02)
note("end")
