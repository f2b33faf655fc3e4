import asyncio
from pathlib import Path
from typing import Any

import pytest

from checkpointing import keys
from checkpointing.errors import StoreUnavailable
from checkpointing.quarantine import Quarantined, quarantine, quarantined_places
from checkpointing.store.directory import DirectoryStore
from orchestrator.core import events as ev
from orchestrator.core.actions import Quarantine
from orchestrator.core.events import Event
from orchestrator.core.state import State
from orchestrator.supervisor import keeping, looks
from orchestrator.supervisor.keeping import put_in_quarantine
from orchestrator.supervisor.looks import Looks
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
    asyncio.run(looking(State(), emitted).read_catalogue(store, "big"))
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
