"""A job of the smallest kind, without torch: python short_job.py SECONDS. Notes start and end."""

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
time.sleep(float(sys.argv[1]))
note("end")
