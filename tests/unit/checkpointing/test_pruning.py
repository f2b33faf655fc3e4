from pathlib import Path

import pytest

from checkpointing import keys
from checkpointing.commit import commit
from checkpointing.pruning import Tokens, delete_all, plan_for, readable
from checkpointing.quarantine import quarantine
from checkpointing.resolver import list_commits, read_catalogue
from checkpointing.retention import RetentionPolicy
from checkpointing.store.directory import DirectoryStore
from tests.unit.checkpointing.saved import save, store_at, upload

ONLY_TWO = RetentionPolicy(keep_last=0, ages_s=0.0)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return store_at(tmp_path / "store")


def save_with_tokens(store: DirectoryStore, step: int, tokens: int | None) -> None:
    records = upload(store, "r", step)
    commit(store, "r", step, 1, records, 2, f"r/1/{step}", tokens=tokens)


def kept(store: DirectoryStore) -> list[int]:
    return [found.step for found in list_commits(store, "r")]


def test_what_an_average_every_so_many_tokens_needs_is_kept(store: DirectoryStore) -> None:
    for step in range(1, 9):
        save_with_tokens(store, step, step * 400)
    policy = RetentionPolicy(keep_last=0, ages_s=0.0, average_every_tokens=1000, average_last=2)
    plan = plan_for(store, "r", policy)
    # Tokens 400 800 | 1200 1600 | 2000 2400 2800 | 3200: the first of the last two slots.
    assert [verdict.place[0] for verdict in plan.keep] == [8, 7, 5]
    delete_all(store, "r", [verdict.place for verdict in reversed(plan.delete)])
    assert kept(store) == [8, 7, 5]


def test_one_whose_tokens_nobody_knows_may_be_the_one_that_is_needed(
    store: DirectoryStore,
) -> None:
    for step in range(1, 7):
        save_with_tokens(store, step, None if step == 2 else step * 10)
    policy = RetentionPolicy(keep_last=0, ages_s=0.0, average_every_tokens=1000, average_last=1)
    plan = plan_for(store, "r", policy)
    why = {verdict.place[0]: verdict.why for verdict in plan.keep}
    assert why[2] == "its tokens are not known"
    assert sorted(why) == [1, 2, 5, 6]


def test_manifests_are_read_once_and_only_where_tokens_are_asked_for(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 6):
        save_with_tokens(store, step, step)
    read: list[str] = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda key: read.append(key) or get(key))
    plan_for(store, "r", ONLY_TWO)
    assert len(read) == 2  # the newest and its fallback, to know that they are sound
    tokens = Tokens(store)
    policy = RetentionPolicy(average_every_tokens=1000)
    for _ in range(3):
        plan_for(store, "r", policy, tokens_of=tokens.of)
    assert len(read) == 2 + 3 * 2 + 5


def test_what_the_run_knows_to_be_bad_is_no_fallback(store: DirectoryStore) -> None:
    for step in range(1, 5):
        save(store, "r", step)
    plan = plan_for(store, "r", ONLY_TWO, shunned={(3, 1)})
    assert {verdict.place[0] for verdict in plan.keep} == {4, 3, 2}  # 3 to look into it
    assert "quarantine" in plan.keep[1].why


def test_one_that_cannot_be_read_is_left_alone(store: DirectoryStore) -> None:
    for step in range(1, 5):
        save(store, "r", step)
    quarantine(store, "r", 1, 1, why="w", who="p")
    key = keys.manifest_key("r", 1, 1)
    store.delete(key)
    store.put_if_absent(key, b"torn")
    catalogue = read_catalogue(store, "r")
    assert readable(store, catalogue, {(1, 1), (2, 1)}) == [(2, 1)]


def test_a_deletion_stops_between_two_when_it_is_told_to(store: DirectoryStore) -> None:
    for step in range(1, 6):
        save(store, "r", step)
    answers = iter([True, False])
    done, freed = delete_all(store, "r", [(1, 1), (2, 1), (3, 1)], lambda: next(answers))
    assert (done, kept(store)) == (1, [5, 4, 3, 2])
    assert freed > 0
