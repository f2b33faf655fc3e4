"""Deletions that end at any point, and what a sweep takes and leaves."""

import os
from pathlib import Path

import pytest

from checkpointing import keys
from checkpointing.content import content_sha256
from checkpointing.deletion import delete_commit, finish_deletions
from checkpointing.errors import ManifestInvalid
from checkpointing.quarantine import quarantine
from checkpointing.resolver import list_commits
from checkpointing.store.base import OpenUpload
from checkpointing.store.directory import DirectoryStore
from checkpointing.sweep import find_orphans, plan_sweep, sweep
from tests.unit.checkpointing.saved import save, store_at, upload


class Killed(BaseException):
    pass


class Mortal:
    """A store whose user is killed before its n-th change."""

    def __init__(self, store: DirectoryStore, lives: int) -> None:
        self._store = store
        self._lives = lives

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def _spend(self) -> None:
        if self._lives == 0:
            raise Killed
        self._lives -= 1

    def put_if_absent(self, key: str, body: bytes) -> bool:
        self._spend()
        return self._store.put_if_absent(key, body)

    def delete(self, key: str) -> None:
        self._spend()
        self._store.delete(key)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return store_at(tmp_path / "store")


def keys_of(store: DirectoryStore, run: str = "run") -> list[str]:
    return [info.key for info in store.list(f"{run}/")]


def test_a_deletion_takes_exactly_what_the_manifest_names(store: DirectoryStore) -> None:
    save(store, "run", 5)
    before = keys_of(store)
    outcome = save(store, "run", 10)
    store.put_if_absent("run/data/step-000000000010/attempt-0001/notes.txt", b"not named")
    assert delete_commit(store, "run", 10, 1) == outcome.nbytes
    notes = "run/data/step-000000000010/attempt-0001/notes.txt"
    assert keys_of(store) == sorted([*before, notes])
    assert delete_commit(store, "run", 10, 1) == 0
    assert content_sha256(store, "run", 5)["all"]


@pytest.mark.parametrize("old", [False, True])
def test_a_deletion_killed_at_any_point_is_finished_by_the_next(
    store: DirectoryStore, old: bool
) -> None:
    save(store, "run", 5)
    keep = keys_of(store)
    lives, done = 0, False
    while not done:
        outcome = save(store, "run", 10)
        if old:
            store.put_if_absent(keys.old_manifest_key("run", 10), store.get(outcome.manifest_key))
        try:
            delete_commit(Mortal(store, lives), "run", 10, 1)  # type: ignore[arg-type]
            done = True
        except Killed:
            lives += 1
        places = [commit.place for commit in list_commits(store, "run")]
        for place in places:
            content_sha256(store, "run", *place)  # what is listed is whole
        finish_deletions(store, "run")
        if (10, 1) in [commit.place for commit in list_commits(store, "run")]:
            assert content_sha256(store, "run", 10)["all"]
            delete_commit(store, "run", 10, 1)
        assert keys_of(store) == keep
    assert lives >= 6


def test_a_note_of_a_deletion_that_had_not_begun_is_dropped(store: DirectoryStore) -> None:
    outcome = save(store, "run", 5)
    packed = store.get(outcome.manifest_key)
    store.put_if_absent(keys.deleting_key("run", 5, 1), packed)
    assert finish_deletions(store, "run") == ()
    assert content_sha256(store, "run", 5)["all"]
    assert store.head(keys.deleting_key("run", 5, 1)) is None


def test_a_manifest_that_cannot_be_read_deletes_nothing(
    store: DirectoryStore, tmp_path: Path
) -> None:
    save(store, "run", 5)
    path = tmp_path / "store" / keys.manifest_key("run", 5, 1)
    path.write_bytes(path.read_bytes().replace(b"5", b"6", 1))
    before = keys_of(store)
    with pytest.raises(ManifestInvalid):
        delete_commit(store, "run", 5, 1)
    assert keys_of(store) == before


def age(folder: Path, days: float) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            at = path.stat().st_mtime - days * 86_400
            os.utime(path, (at, at))


def test_only_old_data_that_was_never_committed_is_an_orphan(
    store: DirectoryStore, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    upload(store, "run", 3)
    upload(store, "run2", 3)  # another run, whose name begins alike
    age(root, 5)
    save(store, "run", 5)
    save(store, "run", 7)
    quarantine(store, "run", 7, 1, why="x", who="y")
    upload(store, "run", 4, 2)
    age(root, 2)
    upload(store, "run", 4, 3)  # young
    save(store, "run", 8)
    upload(store, "run", 9, 4)  # of a step after the newest commit
    now = (root / keys.manifest_key("run", 8, 1)).stat().st_mtime
    plan = find_orphans(store, "run", now)
    assert [orphan.place for orphan in plan.orphans] == [(3, 1), (4, 2)]
    before = keys_of(store)
    taken = [info.key for orphan in plan.orphans for info in orphan.objects]
    assert sweep(store, "run", plan) == sum(orphan.nbytes for orphan in plan.orphans) > 0
    assert keys_of(store) == [key for key in before if key not in taken]
    assert keys_of(store, "run2")
    assert find_orphans(store, "run", now).orphans == ()
    assert [orphan.place for orphan in find_orphans(store, "run", now + 90_000).orphans] == [(4, 3)]


def test_nothing_is_an_orphan_without_a_sound_commit(store: DirectoryStore, tmp_path: Path) -> None:
    upload(store, "run", 3)
    age(tmp_path / "store", 50)
    assert find_orphans(store, "run", 1e12).orphans == ()
    save(store, "run", 9)
    path = tmp_path / "store" / keys.manifest_key("run", 9, 1)
    path.write_bytes(b"spoilt")
    assert find_orphans(store, "run", 1e12).orphans == ()
    save(store, "run", 10)
    found = [orphan.place for orphan in find_orphans(store, "run", 1e12).orphans]
    assert found == [(3, 1)]  # and not step 9, which has a manifest, sound or not


def test_what_an_unreadable_old_manifest_may_name_is_left(
    store: DirectoryStore, tmp_path: Path
) -> None:
    upload(store, "run", 3)
    store.put_if_absent(keys.old_manifest_key("run", 3), b"spoilt")
    age(tmp_path / "store", 50)
    save(store, "run", 9)
    assert find_orphans(store, "run", 1e12).orphans == ()
    assert find_orphans(store, "run", 1e12, in_use={(3, 1)}).orphans == ()


def test_what_is_committed_between_plan_and_sweep_is_left(
    store: DirectoryStore, tmp_path: Path
) -> None:
    upload(store, "run", 3)
    age(tmp_path / "store", 50)
    save(store, "run", 9)
    plan = find_orphans(store, "run", 1e12)
    save(store, "run", 3)
    assert sweep(store, "run", plan) == 0
    assert content_sha256(store, "run", 3)["all"]


def test_open_uploads_are_taken_by_the_same_rules(store: DirectoryStore) -> None:
    save(store, "run", 9)
    (newest,) = list_commits(store, "run")
    assert newest.committed_at is not None
    now = newest.committed_at + 10.0

    def opened(step: int, age_s: float, run: str = "run") -> OpenUpload:
        key = keys.data_key(run, step, 1, 0)
        return OpenUpload(key=key, upload_id="u", started_at=now - age_s)

    uploads = [opened(3, 90_000), opened(3, 50), opened(12, 90_000)]
    assert plan_sweep([], uploads, set(), newest, now).uploads == (uploads[0],)
    assert plan_sweep([], uploads, set(), None, now).uploads == ()
