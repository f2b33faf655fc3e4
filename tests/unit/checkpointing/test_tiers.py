"""Which saves go where, and what that means for the slots of an arena."""

import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import Checkpointer
from checkpointing.stage.arena import MappedArena, UploadState, peek
from checkpointing.store.directory import DirectoryStore
from checkpointing.tiers import EVERYWHERE, NOWHERE, Rhythm, Tier, due
from checkpointing.uploader.watch import Watcher
from tests.unit.checkpointing.ranks import Rank

STEPS = st.integers(min_value=1, max_value=60)


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path, interval=4)


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": np.full(10, value)}


def trained(rank: Rank, steps: int, **environ: str) -> Checkpointer:
    """Train with a save every step and every fourth of them for the store."""
    ck = Checkpointer.from_env(rank.environ(EVERSTEP_MEMORY_STEPS="1", **environ))
    ck.restore(state())
    for step in range(1, steps + 1):
        ck.step(step, state(step))
    return ck


def hold(rank: Rank, step: int, for_s: float) -> None:
    arena = MappedArena(rank.arena)
    (staged,) = (s for s in arena.staged() if s.step == step)
    arena.headers[staged.index].hold(staged.sequence, for_s)
    arena.close()


@given(interval=STEPS, step=st.integers(0, 500))
def test_without_other_tiers_each_save_is_for_the_store(interval: int, step: int) -> None:
    expected = Tier.MEMORY | Tier.STORE if step and step % interval == 0 else NOWHERE
    assert due(step, interval, Rhythm()) == expected


def test_an_interval_of_zero_saves_nothing() -> None:
    assert due(10, 0, Rhythm(memory=5, peer=1)) == NOWHERE


@given(store=STEPS, memory=STEPS, peer=STEPS)
def test_each_tier_gets_the_first_save_at_or_after_each_multiple(
    store: int, memory: int, peer: int
) -> None:
    rhythm = Rhythm(memory=memory, peer=peer)
    saves = [step for step in range(1, 300) if due(step, store, rhythm)]
    assert saves == list(range(min(store, memory), 300, min(store, memory)))
    for tier, every in ((Tier.STORE, store), (Tier.PEER, peer)):
        found = [step for step in saves if tier in due(step, store, rhythm)]
        firsts = {min((s for s in saves if s >= m), default=0) for m in range(every, 300, every)}
        assert found == sorted(firsts - {0})
    assert not any(Tier.DISK in due(step, store, rhythm) for step in saves)


def test_the_mask_stands_in_the_slot(rank: Rank) -> None:
    trained(rank, 2)
    assert {s.step: s.tiers for s in peek(rank.arena)} == {1: Tier.MEMORY, 2: Tier.MEMORY}


def test_snapshots_for_memory_only_give_way_to_the_next(rank: Rank) -> None:
    trained(rank, 3)
    assert rank.steps() == [3, 2]
    assert rank.reading().skipped_saves == 0


def test_what_is_for_the_store_waits_in_its_slot(rank: Rank) -> None:
    trained(rank, 7)
    assert rank.steps() == [7, 4]
    assert (rank.reading().saves, rank.reading().skipped_saves) == (7, 0)
    assert rank.reading().dropped_saves == 0, "nothing was to be sent"


def test_a_failed_upload_is_kept_until_a_newer_one_can_be_sent(rank: Rank) -> None:
    ck = trained(rank, 5)
    rank.mark(UploadState.FAILED, 4)
    for step in (6, 7, 8):
        ck.step(step, state(step))
    assert rank.steps() == [8, 4]
    ck.step(9, state(9))
    assert rank.steps() == [9, 8]


def test_a_slot_that_is_copied_is_not_taken(rank: Rank) -> None:
    ck = trained(rank, 2)
    hold(rank, 1, 60.0)
    ck.step(3, state(3))
    assert rank.steps() == [3, 1]
    hold(rank, 3, 60.0)
    ck.step(5, state(5))
    assert rank.steps() == [3, 1]
    hold(rank, 1, 0.0)
    ck.step(6, state(6))
    assert rank.steps() == [6, 3]


def test_the_hold_of_a_dead_process_ends_by_itself(rank: Rank) -> None:
    ck = trained(rank, 2)
    hold(rank, 1, 1e-6)
    ck.step(3, state(3))
    assert rank.steps() == [3, 2]


def test_the_last_state_is_for_every_tier(rank: Rank) -> None:
    trained(rank, 3).finish(3, state(3))
    newest = max(peek(rank.arena), key=lambda staged: staged.tiers)
    assert (newest.step, newest.tiers) == (3, EVERYWHERE)


def test_without_a_store_no_slot_waits_for_it(rank: Rank) -> None:
    ck = Checkpointer.from_env({**rank.environ(), "EVERSTEP_STORE": ""})
    ck.restore(state())
    for step in (4, 8, 12):
        ck.step(step, state(step))
    assert rank.steps() == [12, 8]
    ck.finish(13, state(13))
    assert rank.steps() == [13, 12]
    assert rank.reading().skipped_saves == 0


def test_the_uploader_sends_only_what_is_for_the_store(rank: Rank) -> None:
    trained(rank, 5)
    folder = rank.arena.parent / "store"
    folder.mkdir()
    sent: list[Any] = []

    def emit(event: Mapping[str, Any]) -> bool:
        sent.append(event)
        return True

    watcher = Watcher(rank.arena.parent, DirectoryStore(folder), "r", emit)
    for _ in range(2):
        watcher.poll()
        deadline = time.monotonic() + 10
        while watcher.busy and time.monotonic() < deadline:
            time.sleep(0.005)
    assert [(e["event"], e["step"]) for e in sent] == [("uploaded", 4)]
