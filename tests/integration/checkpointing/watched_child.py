"""`python -m ...watched_child ROOT`: a watch that is killed at its first step, its second ...

For each it forks, so that only one interpreter has to start, and prints the number of steps.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from checkpointing.store.directory import DirectoryStore
from tests.unit.checkpointing.watched import Points, Watch, write

CONTENT = {"model.bin": bytes(range(256)) * 40, "sub/rng.bin": b"r" * 17, "empty": b""}
ENOUGH = 200


def main(root: Path) -> None:
    for at in range(1, ENOUGH):
        if not _killed(root / f"{at:03d}", at):
            print(at - 1)
            return
    raise AssertionError("it takes more steps than that")


def _killed(place: Path, at: int) -> bool:
    place.mkdir()
    child = os.fork()
    if not child:
        _work(place, at)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def _work(place: Path, at: int) -> None:
    points = Points(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    patch = pytest.MonkeyPatch()
    for module in ("documents", "sending"):
        patch.setattr(f"checkpointing.watched.{module}.PIECE", 4096)
    points.disk(patch)
    (place / "store").mkdir()
    store = points.store(DirectoryStore(place / "store"))
    watch = Watch(place, {"delete": True, "keep": 0}, store)
    write(watch.out / "checkpoint-1", CONTENT)
    watch.poll()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
