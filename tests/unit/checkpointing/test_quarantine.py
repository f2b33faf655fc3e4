from pathlib import Path

import pytest

from checkpointing import keys
from checkpointing.errors import ManifestInvalid, NothingUsable, ObjectMissing, StoreMissing
from checkpointing.quarantine import Quarantined, lift, list_quarantined, quarantine
from checkpointing.resolver import find_commit, list_commits, read_catalogue
from checkpointing.store.directory import DirectoryStore
from tests.unit.checkpointing.saved import save, store_at


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return store_at(tmp_path / "store")


def places(store: DirectoryStore) -> list[tuple[int, int]]:
    return [commit.place for commit in list_commits(store, "run")]


def test_what_failed_once_is_left_out_by_every_later_supervisor(store: DirectoryStore) -> None:
    for step in (5, 10, 15):
        save(store, "run", step)
    assert quarantine(store, "run", 15, 1, why="two\nlines", who="attempt 3", now=lambda: 9.0)
    assert not quarantine(store, "run", 15, 1, why="again", who="attempt 4")
    assert places(store) == [(10, 1), (5, 1)]
    catalogue = read_catalogue(store, "run")
    assert [commit.place for commit in catalogue.quarantined] == [(15, 1)]
    (record,) = list_quarantined(store, "run")
    assert (record.place, record.why, record.who, record.at) == (
        (15, 1),
        "two lines",
        "attempt 3",
        9.0,
    )
    with pytest.raises(ObjectMissing, match="step 15 is not committed outside quarantine"):
        find_commit(store, "run", 15)
    assert find_commit(store, "run", 15, 1).place == (15, 1)


def test_a_quarantined_step_is_committed_again_by_a_later_attempt(store: DirectoryStore) -> None:
    for step in (5, 10):
        save(store, "run", step)
    quarantine(store, "run", 10, 1, why="x", who="y")
    assert save(store, "run", 10, 2).committed
    assert places(store) == [(10, 2), (5, 1)]
    assert find_commit(store, "run", 10).attempt == 2


def test_a_person_may_lift_it(store: DirectoryStore) -> None:
    save(store, "run", 5)
    quarantine(store, "run", 5, 1, why="x", who="y")
    with pytest.raises(NothingUsable, match="1 in quarantine"):
        places(store)  # and not "no commits", which would begin the run anew
    assert lift(store, "run", 5, 1)
    assert not lift(store, "run", 5, 1)
    assert places(store) == [(5, 1)]


def test_a_spoilt_record_still_keeps_the_checkpoint_out(store: DirectoryStore) -> None:
    save(store, "run", 5)
    store.put_if_absent(keys.quarantine_key("run", 5, 1), b"spoilt")
    store.put_if_absent("run/quarantine/notes.txt", b"x")
    with pytest.raises(NothingUsable):
        places(store)
    (record,) = list_quarantined(store, "run")
    assert "cannot be read" in record.why
    body = Quarantined(run="run", step=5, attempt=1, why="w", who="p", at=1.0).pack()
    store.put_if_absent(keys.quarantine_key("run", 6, 1), body)
    assert "copy" in list_quarantined(store, "run")[0].why


def test_a_store_that_cannot_be_asked_is_no_empty_quarantine(
    store: DirectoryStore, tmp_path: Path
) -> None:
    (tmp_path / "store").rename(tmp_path / "moved")
    with pytest.raises(StoreMissing):
        list_quarantined(store, "run")
    with pytest.raises(StoreMissing):
        read_catalogue(store, "run")


def test_only_the_newest_and_its_fallback_are_read(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 9):
        save(store, "run", step)
    read: list[str] = []
    real = store.get
    monkeypatch.setattr(store, "get", lambda key: (read.append(key), real(key))[1])
    assert [commit.step for commit in list_commits(store, "run")] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert read == [keys.manifest_key("run", 8, 1), keys.manifest_key("run", 7, 1)]


def test_spoilt_newest_ones_are_passed_over(store: DirectoryStore, tmp_path: Path) -> None:
    for step in range(1, 6):
        save(store, "run", step)
    for step in (5, 3):
        (tmp_path / "store" / keys.manifest_key("run", step, 1)).write_bytes(b"{}")
    assert [commit.step for commit in list_commits(store, "run")] == [4, 2, 1]
    assert [commit.step for commit in list_commits(store, "run", verified=9)] == [4, 2, 1]


@pytest.mark.parametrize("field", ["step", "attempt", "run", "why", "who", "at"])
def test_a_record_of_wrong_types_is_none(field: str) -> None:
    record = Quarantined(run="run", step=5, attempt=1, why="w", who="p", at=1.0)
    object.__setattr__(record, field, [1])
    with pytest.raises(ManifestInvalid):
        Quarantined.unpack(record.pack())
