"""A trainer's folders, a watch on them with its own clock, and a death at any of its steps."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from checkpointing.store.base import ObjectStore
from checkpointing.store.directory import DirectoryStore
from checkpointing.watched import verbs
from checkpointing.watched.disk import Finished
from checkpointing.watched.rules import Rules
from checkpointing.watched.watching import Watching

NAME = "run"
Content = Mapping[str, bytes]


def write(folder: Path, content: Content) -> None:
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def content(folder: Path) -> dict[str, bytes]:
    if folder.is_file():
        return {folder.name: folder.read_bytes()}
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@dataclass
class Watch:
    """Watches `root/out` into `root/store`; time passes only when told."""

    root: Path
    rules: dict[str, Any] = field(default_factory=dict)
    store: ObjectStore | None = None
    now: float = 0.0
    events: list[Mapping[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out = self.root / self.rules.pop("out", "out")
        (self.root / "store").mkdir(exist_ok=True)
        self.out.mkdir(exist_ok=True)
        self.store = self.store or DirectoryStore(self.root / "store")
        defaults = {"finished": Finished(how="rename"), "node": "a"}
        self.rules = {**defaults, **self.rules}
        self.watching = self._made()

    def _made(self) -> Watching:
        rules = Rules(directory=self.out, pattern="checkpoint-*", prefix=NAME, **self.rules)
        assert self.store is not None
        return Watching(rules, self.store, self._tell, clock=lambda: self.now)

    def _tell(self, event: Mapping[str, Any]) -> bool:
        self.events.append(event)
        return True

    def restart(self, **rules: Any) -> None:
        self.watching.close()
        self.rules.update(rules)
        self.watching = self._made()

    def poll(self, passes_s: float = 100.0) -> None:
        self.now += passes_s
        self.watching.poll()

    def told(self, event: str) -> list[Any]:
        return [one["entry"] for one in self.events if one["event"] == event]

    @property
    def said(self) -> list[str]:
        return [one["why"] for one in self.events if "why" in one]

    def fetched(self, entry: str | None = None, into: str = "back", node: str = "") -> Any:
        assert self.store is not None
        path = verbs.restore(self.store, NAME, self.root / into, entry=entry, node=node)
        return content(path) if path is not None else None

    def committed(self) -> dict[str, int]:
        assert self.store is not None
        return {row["entry"]: row["version"] for row in verbs.rows(self.store, NAME)}


class Points:
    """Counts the steps that leave something behind, and does something at one of them.

    Every request to the store counts twice, before and after it, and so does each change of the
    disk by a deletion.
    """

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self._at = at
        self._act = act
        self.passed = 0

    def step(self) -> None:
        self.passed += 1
        if self.passed == self._at:
            self._act()

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **options: Any) -> Any:
            self.step()
            done = work(*args, **options)
            self.step()
            return done

        return stepped

    def store(self, store: ObjectStore) -> Any:
        class Stepped:
            def __getattr__(_, name: str) -> Any:  # noqa: N805
                return self.around(getattr(store, name))

        return Stepped()

    def disk(self, patch: pytest.MonkeyPatch) -> None:
        for owner, name in ((Path, "rename"), (Path, "unlink"), (Path, "rmdir")):
            patch.setattr(owner, name, self.around(getattr(owner, name)))


def node_rules(root: Path, node: str, attempts: Path) -> dict[str, Any]:
    return {"out": f"out-{node}", "node": node, "nodes": 2, "attempts": attempts}


def set_time(folder: Path, seconds: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (seconds, seconds))
