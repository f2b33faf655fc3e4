"""What a save does when the uploads before it still run, and who restores what in other worlds."""

import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointing import Checkpointer
from checkpointing.commit import UploadRecord, commit
from checkpointing.stage.arena import MappedArena, UploadState
from checkpointing.stage.stager import Stager
from checkpointing.store.base import open_store
from checkpointing.uploader.send import send
from tests.unit.checkpointing.ranks import Rank


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": np.full(10, value)}


def started(rank: Rank, **environ: str) -> Checkpointer:
    ck = Checkpointer.from_env(rank.environ(**environ))
    ck.restore(state())
    ck.step(1, state())
    ck.step(2, state())
    return ck


def test_by_default_a_save_is_skipped_and_counted(rank: Rank) -> None:
    started(rank).step(3, state())
    assert rank.steps() == [2, 1]
    assert (rank.reading().skipped_saves, rank.reading().dropped_saves) == (1, 0)


def test_replace_lets_the_newest_win_and_counts_what_was_dropped(rank: Rank) -> None:
    ck = started(rank, EVERSTEP_STAGE_POLICY="replace")
    ck.step(3, state())
    assert rank.steps() == [3, 2]
    rank.mark(UploadState.UPLOADING, 2)
    ck.step(4, state())
    assert rank.steps() == [4, 2]
    ck.step(5)
    reading = rank.reading()
    assert (reading.skipped_saves, reading.dropped_saves, reading.saves) == (0, 2, 4)


def test_replace_does_not_tear_uploads(rank: Rank) -> None:
    ck = started(rank, EVERSTEP_STAGE_POLICY="replace")
    rank.mark(UploadState.UPLOADING)
    ck.step(3, state())
    assert rank.steps() == [2, 1]
    assert rank.reading().skipped_saves == 1


def test_wait_waits_for_a_slot(rank: Rank) -> None:
    ck = started(rank, EVERSTEP_STAGE_POLICY="wait")
    sent = threading.Timer(0.1, rank.mark, (UploadState.UPLOADED, 1))
    sent.start()
    ck.step(3, state())
    sent.join()
    assert rank.steps() == [3, 2]
    assert rank.reading().skipped_saves == 0


def test_wait_does_not_wait_for_ever(rank: Rank) -> None:
    ck = started(rank, EVERSTEP_STAGE_POLICY="wait", EVERSTEP_STAGE_WAIT_S="0.05")
    ck.step(3, state())
    assert rank.steps() == [2, 1]
    assert rank.reading().skipped_saves == 1


def test_a_policy_that_does_not_exist_is_named(rank: Rank) -> None:
    with pytest.raises(ValueError, match="'hope' is not a valid StagePolicy"):
        Checkpointer.from_env(rank.environ(EVERSTEP_STAGE_POLICY="hope"))


@pytest.fixture
def saved_by_two(rank: Rank, tmp_path: Path) -> dict[str, str]:
    """A commit of two ranks, each with a state of its own; the environment to restore it as one."""
    (tmp_path / "store").mkdir()
    store = open_store(rank.store)
    records = []
    for number in range(2):
        path = tmp_path / f"arena-of-{number}"
        stager = Stager(path, attempt=1, rank=number, world=2)
        stager.stage(5, state(3.0), {"place": np.full(2, number)})
        arena = MappedArena(path)
        sent = send(store, "r", arena, arena.staged()[0])
        arena.close()
        crc = sent.index_crc64
        records.append(UploadRecord(rank=number, index_key=sent.index_key, index_crc64=crc))
    assert commit(store, "r", 5, 1, records, 2, "w").committed
    return rank.environ(attempt=2, restore={"step": 5, "attempt": 1, "source": "store"})


def test_the_own_state_of_another_world_is_refused(
    saved_by_two: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        Checkpointer.from_env(saved_by_two).restore(state(), {"place": np.zeros(2)})
    assert end.value.code == 77
    assert "own state of 2 ranks, not 1" in capfd.readouterr().err


def test_or_it_stays_as_the_script_made_it_with_one_warning(
    saved_by_two: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    whole, own = state(), {"place": np.full(2, 9)}
    with caplog.at_level(logging.WARNING):
        step = Checkpointer.from_env(saved_by_two).restore(whole, own, on_other_world="fresh")
    assert step == 5
    assert whole["w"].tolist() == [3.0] * 10
    assert own["place"].tolist() == [9, 9]
    (record,) = caplog.records
    assert "saved by 2 ranks, this is one of 1" in record.getMessage()


def test_in_the_same_world_it_is_restored_whatever_was_asked(rank: Rank) -> None:
    ck = Checkpointer.from_env(rank.environ())
    ck.restore(state(), {"place": np.zeros(2)})
    ck.step(1, state(), {"place": np.full(2, 4.0)})
    own = {"place": np.zeros(2)}
    again = Checkpointer.from_env(rank.from_memory(1))
    assert again.restore(state(), own, on_other_world="fresh") == 1
    assert own["place"].tolist() == [4, 4]
