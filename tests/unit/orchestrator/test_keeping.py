import asyncio
from pathlib import Path
from typing import Any

import pytest

from checkpointing import keys
from checkpointing.errors import StoreDenied, StoreUnavailable
from checkpointing.quarantine import Quarantined, quarantine, quarantined_places
from checkpointing.resolver import list_commits
from checkpointing.retention import RetentionPolicy
from checkpointing.store.directory import DirectoryStore
from orchestrator.core import events as ev
from orchestrator.core.actions import Quarantine
from orchestrator.core.events import Event
from orchestrator.core.state import State
from orchestrator.supervisor import keeping, looks, retention
from orchestrator.supervisor.keeping import prune, put_in_quarantine
from orchestrator.supervisor.looks import Looks
from orchestrator.supervisor.retention import Retention
from tests.unit.checkpointing.saved import save, store_at
from tests.unit.orchestrator.desk import until

SPOILT = Quarantine(step=20, attempt=3, why="w: its bytes fail\ntheir CRC", found_by=4)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return store_at(tmp_path / "store")


class Silent:
    """A store that does not answer so many times."""

    def __init__(self, store: DirectoryStore, times: int) -> None:
        self._store, self.left = store, times

    def put_if_absent(self, key: str, body: bytes) -> bool:
        if self.left > 0:
            self.left -= 1
            raise StoreUnavailable("no answer")
        return self._store.put_if_absent(key, body)


def looking(state: State, emitted: list[Event]) -> Looks:
    nobody: Any = None
    return Looks(nobody, nobody, nobody, lambda: state, emitted.append)


def test_what_failed_is_written_down_in_the_store_by_whom_and_why(store: DirectoryStore) -> None:
    assert asyncio.run(put_in_quarantine(store, "big", SPOILT)) == (True, "")
    record = Quarantined.unpack(store.get(keys.quarantine_key("big", 20, 3)))
    assert (record.step, record.attempt, record.who) == (20, 3, "attempt 4 of the run")
    assert record.why == "w: its bytes fail their CRC"
    assert asyncio.run(put_in_quarantine(store, "big", SPOILT)) == (True, "it was there before")


def test_a_silent_store_is_asked_again_but_not_for_ever(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "FIRST_PAUSE_S", 0.001)
    silent: Any = Silent(store, 3)
    assert asyncio.run(put_in_quarantine(silent, "big", SPOILT)) == (True, "")
    assert quarantined_places(store, "big") == {(20, 3)}
    silent = Silent(store, 1000)
    assert asyncio.run(put_in_quarantine(silent, "big", SPOILT)) == (False, "no answer")
    assert silent.left == 1000 - keeping.TRIES


def test_the_catalogue_tells_usable_and_quarantined_apart(store: DirectoryStore) -> None:
    for step, attempt in ((10, 1), (20, 2), (30, 3)):
        save(store, "big", step, attempt)
    quarantine(store, "big", 30, 3, why="w", who="p")
    emitted: list[Event] = []

    async def main() -> None:
        task = asyncio.ensure_future(looking(State(), emitted).read_catalogue(store, "big"))
        await until(lambda: emitted)
        task.cancel()

    asyncio.run(main())
    assert emitted == [ev.CatalogueRead(commits=((20, 2), (10, 1)), quarantined=((30, 3),))]


def test_what_others_condemn_while_the_run_goes_on_is_heard_of_once(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "QUARANTINE_S", 0.005)
    emitted: list[Event] = []
    state = State(catalogue_read=True, commits=((20, 2), (10, 1)), in_quarantine=frozenset())
    known = State(catalogue_read=True, commits=state.commits, in_quarantine=frozenset({(20, 2)}))
    now = [state]

    async def main() -> None:
        nobody: Any = None
        eyes = Looks(nobody, nobody, nobody, lambda: now[0], emitted.append)
        task = asyncio.ensure_future(eyes.read_quarantine(store, "big"))
        await asyncio.sleep(0.05)
        assert emitted == []
        for place in ((20, 2), (99, 1)):  # the second is none of this run's
            quarantine(store, "big", *place, why="w", who="p")
        await until(lambda: bool(emitted))
        now[0], seen = known, len(emitted)
        await asyncio.sleep(0.05)
        assert len(emitted) == seen
        task.cancel()

    asyncio.run(main())
    assert set(emitted) == {ev.QuarantineRead(places=((20, 2),))}


PLACES = ((1, 1), (2, 1), (3, 1))


def committed(store: DirectoryStore) -> list[int]:
    return [found.step for found in list_commits(store, "big")]


def test_what_is_deleted_is_said_with_the_bytes_that_it_freed(store: DirectoryStore) -> None:
    for step in range(1, 6):
        save(store, "big", step)
    ok, detail = asyncio.run(prune(store, "big", PLACES))
    assert ok
    assert detail.startswith("3 checkpoints, ")
    assert committed(store) == [5, 4]
    # As the next supervisor does whose journal has the order, but not its end.
    assert asyncio.run(prune(store, "big", PLACES)) == (True, "3 checkpoints, 0 B freed")


def test_a_store_that_refuses_to_delete_is_a_problem_and_no_exception(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 6):
        save(store, "big", step)

    def denied(_: str) -> None:
        raise StoreDenied("s3://b: no permission to delete")

    monkeypatch.setattr(store, "delete", denied)
    assert asyncio.run(prune(store, "big", PLACES)) == (False, "s3://b: no permission to delete")
    assert committed(store) == [5, 4, 3, 2, 1]


def test_a_deletion_takes_no_longer_than_it_may(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "PRUNE_S", -1.0)
    save(store, "big", 1)
    ok, detail = asyncio.run(prune(store, "big", PLACES))
    assert not ok
    assert "0 of 3 deleted" in detail


def keeps(store: Any, state: State, emitted: list[Event]) -> Retention:
    policy = RetentionPolicy(keep_last=2, ages_s=0.0)
    return Retention(store, "big", policy, lambda: state, emitted.append)


def looks_until(work: Retention, emitted: list[Event]) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(work.run())
        await until(lambda: bool(emitted))
        task.cancel()

    asyncio.run(main())


def test_after_a_commit_it_is_said_what_no_rule_keeps(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "POLL_S", 0.005)
    for step in range(1, 7):
        save(store, "big", step)
    places = tuple((step, 1) for step in range(6, 0, -1))
    state = State(catalogue_read=True, commits=places, committed_at=5.0)
    emitted: list[Event] = []
    looks_until(keeps(store, state, emitted), emitted)
    assert emitted == [ev.RetentionPlanned(places=((1, 1), (2, 1), (3, 1), (4, 1)))]
    assert committed(store) == [6, 5, 4, 3, 2, 1], "a look deletes nothing"


def test_a_store_that_cannot_be_listed_is_said_once_and_deletes_nothing(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_: str) -> Any:
        raise StoreUnavailable("s3://b: no answer")

    monkeypatch.setattr(store, "list", silent)
    emitted: list[Event] = []
    work = keeps(store, State(catalogue_read=True, committed_at=5.0), emitted)
    asyncio.run(work._look(State()))
    asyncio.run(work._look(State()))
    assert emitted == [ev.RetentionPlanned(places=(), problem="s3://b: no answer")]


def test_a_mistake_of_ours_in_a_look_ends_no_run(store: DirectoryStore) -> None:
    emitted: list[Event] = []
    work = keeps(store, State(), emitted)
    work._find = lambda state: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    asyncio.run(work._look(State()))
    (said,) = emitted
    assert isinstance(said, ev.RetentionPlanned)
    assert said.places == ()
    assert "ZeroDivisionError" in said.problem
