"""Whatever is written, killed and started again: a folder is on the disk or can be had back."""

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointing.errors import CheckpointingError
from checkpointing.store.directory import DirectoryStore
from tests.unit.checkpointing.watched import Points, Watch, content, write

STEPS = ("checkpoint-1", "checkpoint-2", "checkpoint-3")
FILES = st.dictionaries(
    st.sampled_from(["a", "b", "sub/c"]), st.binary(max_size=40), min_size=1, max_size=3
)
WRITE = st.tuples(st.just("write"), st.sampled_from(STEPS), FILES)
POLL = st.tuples(st.just("poll"), st.integers(1, 60), st.none())
CHANGE = st.tuples(st.just("change"), st.sampled_from(STEPS), FILES)


class Killed(BaseException):
    """What a kill is to the code that runs."""


def _die() -> None:
    raise Killed


class Run:
    """A trainer that writes, and watches that die; `owed` is what must not be lost."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.watch = Watch(root, {"delete": True, "keep": 0})
        self.owed: dict[str, dict[str, bytes]] = {}
        self.number = itertools.count()

    def write(self, name: str, files: dict[str, bytes]) -> None:
        """Write a checkpoint anew, as a trainer does: elsewhere first, then under its name."""
        place = self.root / "being written"
        write(place, files)
        shutil.rmtree(self.watch.out / name, ignore_errors=True)
        place.rename(self.watch.out / name)
        self.owed[name] = files

    def change(self, name: str, files: dict[str, bytes]) -> None:
        """Write into a checkpoint that is there."""
        if (self.watch.out / name).is_dir():
            write(self.watch.out / name, files)
            self.owed[name] = content(self.watch.out / name)

    def poll(self, dies_at: int) -> None:
        points = Points(dies_at, _die)
        store = self.watch.store
        with pytest.MonkeyPatch.context() as patch:
            points.disk(patch)
            self.watch.store = points.store(DirectoryStore(self.root / "store"))
            self.watch.restart()
            try:
                self.watch.poll()
            except Killed:
                pass
            finally:
                self.watch.store = store
                self.watch.restart()

    def check(self) -> None:
        for name, files in self.owed.items():
            assert self.on_disk(name) == files or self.in_store(name) == files, name

    def on_disk(self, name: str) -> Any:
        path = self.watch.out / name
        return content(path) if path.is_dir() else None

    def in_store(self, name: str) -> Any:
        try:
            return self.watch.fetched(name, into=f"back-{next(self.number)}")
        except CheckpointingError:
            return None


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(st.one_of(WRITE, POLL, POLL, CHANGE), min_size=2, max_size=9))
def test_nothing_is_ever_neither_here_nor_there(steps: list[tuple[str, Any, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        for module in ("documents", "sending"):
            patch.setattr(f"checkpointing.watched.{module}.PIECE", 32)
        run = Run(Path(folder))
        for step in steps:
            if step[0] == "poll":
                run.poll(step[1])
            else:
                getattr(run, step[0])(step[1], step[2])
            run.check()
        run.watch.restart()
        run.watch.poll()
        run.watch.poll()
        for name, files in run.owed.items():
            assert run.in_store(name) == files
        assert not [p for p in run.watch.out.iterdir() if "everstep-watch.lock" not in p.name]
