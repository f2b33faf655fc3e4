"""Ranks that die at one line after the other while they stage, and what each of them leaves.

python -m tests.faults.dying_ranks FOLDER same|grows STRIDE: prints how many died, or what is wrong.
"""

import os
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import checkpointing
from checkpointing.errors import RestoreFailed
from checkpointing.restore import Point, restore_from_memory
from checkpointing.stage.arena import MappedArena, UploadState, peek
from checkpointing.stage.stager import Stager

STAGING = tuple(
    str(Path(checkpointing.__file__).parent / name) for name in ("stage", "seqlock.py", "leaves.py")
)


def state(step: int, side: int = 3000) -> dict[str, Any]:
    weights = np.full(side, float(step))
    return {"model": {"w": weights, "b": np.full(5, step)}, "none": np.empty(0), "n": step}


def begin(path: Path) -> bytes:
    """Return an arena with two snapshots that are in the store, so that a slot is free."""
    stager = Stager(path, attempt=1, rank=0, world=1)
    for step in (1, 2):
        stager.stage(step, state(step), {"x": np.full(3, step)})
    arena = MappedArena(path)
    for staged in arena.staged():
        arena.headers[staged.index].mark(staged.sequence, UploadState.UPLOADED)
    arena.close()
    return path.read_bytes()


class Death:
    """Ends the process at its n-th line of staging, in whatever thread."""

    def __init__(self, line: int) -> None:
        self._left = line

    def __call__(self, frame: FrameType, event: str, _: object) -> "Death | None":
        if not frame.f_code.co_filename.startswith(STAGING):
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def stage(path: Path, line: int, side: int) -> bool:
    """Let a rank stage step 3 and die at a line; False when it lived."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            death = Death(line)
            threading.settrace(death)
            sys.settrace(death)
            stager = Stager(path, attempt=2, rank=0, world=1)
            stager.stage(3, state(3, side), {"x": np.full(3, 3)})
            code = 0
        finally:
            sys.settrace(None)
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL), status
    return os.waitstatus_to_exitcode(status) != 0


def check(path: Path, side: int) -> None:
    """Whatever is described as whole is whole; the newest before is still there."""
    held = {slot.step: slot.attempt for slot in peek(path)}
    assert 2 in held, held
    assert set(held) <= {1, 2, 3}, held
    for step, attempt in held.items():
        of = side if step == 3 else 3000
        found, local = state(0, of), {"x": np.zeros(3, np.int64)}
        restore_from_memory(path, Point(step=step, attempt=attempt), 0, 1, found, local)
        assert found["n"] == step
        assert (found["model"]["w"] == step).all()
        assert (found["model"]["b"] == step).all()
        assert (local["x"] == step).all()
    if 3 not in held:
        try:
            place = Point(step=3, attempt=2)
            restore_from_memory(path, place, 0, 1, state(0, side), {"x": np.zeros(3, np.int64)})
        except RestoreFailed:
            pass
        else:
            raise AssertionError("restored what is not whole")
    stager = Stager(path, attempt=3, rank=0, world=1)
    if stager.has_room():
        stager.stage(4, state(4), {"x": np.full(3, 4)})
        assert peek(path)[0].step == 4


def main() -> None:
    folder, side, stride = Path(sys.argv[1]), 3000, int(sys.argv[3])
    if sys.argv[2] == "grows":
        side = 90_000
    whole = begin(folder / "arena-0")
    died = 0
    for line in count(0, stride):
        path = folder / f"arena-{line + 1}"
        path.write_bytes(whole)
        lived = not stage(path, line, side)
        try:
            check(path, side)
        except Exception as error:
            raise AssertionError(f"died at line {line} of staging: {error!r}") from error
        for left in folder.glob(f"*arena-{line + 1}*"):
            left.unlink()
        if lived:
            break
        died += 1
    print(died)


if __name__ == "__main__":
    main()
