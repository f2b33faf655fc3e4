"""What is copied when: due slots, newest first, once, held meanwhile, tried again."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.errors import ReplicaError
from checkpointing.replicas import copies
from checkpointing.replicas.copies import Copies, Holds
from checkpointing.replicas.snapshot import SnapshotFile
from checkpointing.stage.arena import StagedSlot, peek
from checkpointing.tiers import Tier
from tests.unit.checkpointing.replicas.made import Rank, state


class Desk:
    """Copies that are polled by hand, to a place that can be told to refuse or to wait."""

    def __init__(self, folder: Path) -> None:
        self.rank = Rank(folder)
        self.copied: list[int] = []
        self.events: list[Mapping[str, Any]] = []
        self.errors: list[Exception] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.holds = Holds()
        self.copies = Copies(folder, Tier.PEER, self._copy, self.holds, self._emit)

    def _emit(self, event: Mapping[str, Any]) -> bool:
        self.events.append(event)
        return True

    def _copy(self, snapshot: SnapshotFile, staged: StagedSlot) -> int:
        assert self.go_on.wait(20)
        if self.errors:
            raise self.errors.pop()
        self.copied.append(staged.step)
        return 1000

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not true():
            assert time.monotonic() < deadline
            self.copies.poll()
            self.holds.renew()
            time.sleep(0.002)

    def settle(self) -> None:
        for _ in range(3):
            self.copies.poll()
            self.until(lambda: not self.copies.busy)

    def held(self) -> list[int]:
        return [staged.step for staged in peek(self.rank.path) if staged.held]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(copies, "_FIRST_WAIT_S", 0.01)
    made = Desk(tmp_path / "n")
    yield made
    made.go_on.set()
    made.settle()


def test_the_newest_is_copied_first_and_each_once(desk: Desk) -> None:
    desk.rank.stage(1)
    desk.rank.stage(2)
    desk.settle()
    assert desk.copied == [2, 1]
    desk.rank.stage(3)
    desk.settle()
    assert desk.copied == [2, 1, 3]
    assert [(e["event"], e["tier"], e["step"]) for e in desk.events] == [
        ("copied", "peer", step) for step in (2, 1, 3)
    ]
    assert set(desk.events[0]) == {
        *("event", "tier", "rank", "world", "step", "attempt", "nbytes", "seconds", "gb_per_s")
    }


def test_only_what_is_due_for_the_tier_is_copied(desk: Desk) -> None:
    desk.rank.stager.stage(1, state(1), None, tiers=Tier.DISK)
    desk.rank.stager.stage(2, state(2), None, tiers=Tier.PEER | Tier.STORE)
    desk.settle()
    assert desk.copied == [2]


def test_a_slot_is_held_as_long_as_it_is_copied_and_the_rank_takes_the_other(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "HOLD_S", 0.5)
    monkeypatch.setattr(copies, "_RENEW_S", 0.1)
    desk.go_on.clear()
    desk.rank.stage(1)
    desk.until(desk.held)
    desk.rank.stage(2)
    desk.rank.stage(3)
    assert [staged.step for staged in peek(desk.rank.path)] == [3, 1]
    begun = time.monotonic()
    desk.until(lambda: time.monotonic() > begun + 1.0)
    assert desk.held() == [1]
    desk.go_on.set()
    desk.settle()
    assert desk.held() == []
    assert desk.copied == [1, 3]


def test_a_dead_holders_hold_ends_by_itself(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "HOLD_S", 0.3)
    desk.rank.stage(1)
    with SnapshotFile(desk.rank.path) as snapshot:
        snapshot.headers[0].hold(snapshot.headers[0].record.sequence, 0.3)
    assert desk.held() == [1]
    desk.settle()
    assert desk.copied == [1]
    assert desk.held() == []


def test_two_holders_of_one_slot_hold_it_until_both_are_done(desk: Desk) -> None:
    desk.rank.stage(1)
    (staged,) = peek(desk.rank.path)
    with SnapshotFile(desk.rank.path) as one, SnapshotFile(desk.rank.path) as two:
        with desk.holds.on(desk.rank.path, one.headers[0], staged):
            with desk.holds.on(desk.rank.path, two.headers[0], staged):
                pass
            assert desk.held() == [1]
        assert desk.held() == []


def test_a_failure_is_told_and_tried_again(desk: Desk) -> None:
    desk.errors = [ReplicaError("no\nroom"), OSError(111, "refused")]
    desk.rank.stage(1)
    desk.until(lambda: desk.copied)
    desk.settle()
    assert [event.get("error") for event in desk.events] == ["[Errno 111] refused", "no room", None]
    assert desk.held() == []


def test_a_place_that_has_gone_is_told_too(desk: Desk) -> None:
    desk.errors = [FileNotFoundError(2, "no such folder")]
    desk.rank.stage(1)
    desk.until(lambda: desk.copied)
    desk.settle()
    assert [event["event"] for event in desk.events] == ["copy_failed", "copied"]


def test_an_arena_that_has_gone_or_has_lost_a_slot_is_nothing_to_tell(desk: Desk) -> None:
    desk.rank.stage(1)
    (staged,) = peek(desk.rank.path)
    assert desk.copies._copy_held(desk.rank.path, replace(staged, step=2)) is None
    assert desk.copies._copy_held(desk.rank.path, replace(staged, index=2)) is None
    assert desk.copies._copy_held(desk.rank.path.with_name("arena-9"), staged) is None
    desk.settle()
    assert [event["event"] for event in desk.events] == ["copied"]


def test_a_slot_that_was_written_over_meanwhile_is_no_failure(desk: Desk) -> None:
    desk.go_on.clear()
    desk.errors = [ReplicaError("bytes fail their CRC")]
    desk.rank.stage(1)
    desk.until(desk.held)
    with SnapshotFile(desk.rank.path) as snapshot:
        snapshot.headers[0].record.begin()
    desk.go_on.set()
    desk.settle()
    assert desk.events == []


def test_a_new_place_gets_everything_again(desk: Desk) -> None:
    desk.rank.stage(1)
    desk.settle()
    desk.copies.forget()
    desk.settle()
    assert desk.copied == [1, 1]


def test_what_ends_after_the_place_has_changed_does_not_count_for_the_new_one(desk: Desk) -> None:
    desk.go_on.clear()
    desk.rank.stage(1)
    desk.until(desk.held)
    desk.copies.forget()
    desk.go_on.set()
    desk.settle()
    assert desk.copied == [1, 1]
