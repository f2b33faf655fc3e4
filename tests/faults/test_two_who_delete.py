"""Retention, a prune by hand, a sweep or a save between any two requests of a prune."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing.content import content_sha256
from checkpointing.deletion import finish_deletions
from checkpointing.pruning import delete_all, plan_for
from checkpointing.resolver import list_commits
from checkpointing.retention import RetentionPolicy
from checkpointing.store.base import ObjectStore
from checkpointing.store.directory import DirectoryStore
from checkpointing.sweep import find_orphans
from tests.unit.checkpointing.saved import save, store_at

POLICY = RetentionPolicy(keep_last=0, ages_s=0.0)
SAVED = 3


def prune(store: ObjectStore) -> None:
    plan = plan_for(store, "r", POLICY)
    delete_all(store, "r", [verdict.place for verdict in reversed(plan.delete)])


def save_next(store: ObjectStore) -> None:
    assert save(store, "r", SAVED + 1).committed


class Between:
    """A store that has something done before its n-th request."""

    def __init__(self, store: DirectoryStore, n: int, do: Callable[[ObjectStore], object]) -> None:
        self._store, self._left, self._do = store, n, do
        self.done = False

    def __getattr__(self, name: str) -> Any:
        if not self.done:
            self._left -= 1
            if self._left < 0:
                self.done = True
                self._do(self._store)
        return getattr(self._store, name)


@pytest.mark.parametrize(
    "other",
    [prune, save_next, lambda store: finish_deletions(store, "r")],
    ids=["prune", "save", "clean up"],
)
def test_a_prune_bears_another_at_any_request(
    tmp_path: Path, other: Callable[[ObjectStore], object]
) -> None:
    n, done = 0, True
    while done:
        store = store_at(tmp_path / str(n))
        for step in range(1, SAVED + 1):
            save(store, "r", step)
        between: Any = Between(store, n, other)
        prune(between)
        done = between.done
        newest = SAVED + (1 if done and other is save_next else 0)
        steps = [found.step for found in list_commits(store, "r")]
        assert steps[0] == newest, n
        assert {newest, SAVED} <= set(steps) <= {newest, SAVED, SAVED - 1}, n
        for step in steps:
            assert content_sha256(store, "r", step), n
        later = time.time() + 3600.0
        assert not find_orphans(store, "r", later, older_than_s=0.0).orphans, n
        assert store.list("r/deleting") == (), n
        n += 1
    assert n > 10, "there are so many requests at least"
