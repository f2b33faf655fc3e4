"""A rank whose store is away waits for it, and says nothing of the checkpoint when it stays so."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tenacity import RetryCallState

from checkpointing import Checkpointer, keys, restoring
from checkpointing.restoring import LONGEST_WAIT_S
from tests.unit.checkpointing.ranks import Rank
from tests.unit.checkpointing.saved import save, store_at, weights

SPEC = {"step": 1, "attempt": 1, "source": "store"}
BRIEF = "0.02"  # seconds for a step: a tenth of a second for the store


def empty() -> dict[str, Any]:
    state = weights(2)
    for part in (state["model"], state["optimizer"]):
        for value in part.values():
            if isinstance(value, np.ndarray):
                value[:] = 0
    return state


@pytest.fixture(autouse=True)
def sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is for ranks: let this process end by SIGTERM as before."""
    monkeypatch.setattr("checkpointing.heartbeat.TermGuard.install", lambda _: None)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    rank = Rank(tmp_path)
    save(store_at(tmp_path / "store"), "r", 1, world=1)
    return rank


def away(folder: Path) -> None:
    (folder / "store").rename(folder / "elsewhere")


def unmounted(folder: Path) -> None:
    away(folder)
    (folder / "store").mkdir()


def back(folder: Path) -> None:
    shutil.rmtree(folder / "store", ignore_errors=True)
    (folder / "elsewhere").rename(folder / "store")


@pytest.mark.parametrize("leave", [away, unmounted])
def test_a_store_that_comes_back_is_restored_from(
    rank: Rank, tmp_path: Path, leave: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path)
    tries: list[int] = []

    def asked_in_vain(state: RetryCallState) -> None:
        tries.append(state.attempt_number)
        if len(tries) == 2:
            back(tmp_path)

    monkeypatch.setattr(restoring, "_say_away", asked_in_vain)
    state = empty()
    ck = Checkpointer.from_env(rank.environ(attempt=2, restore=SPEC, EVERSTEP_STEP_TIMEOUT_S="60"))
    assert ck.restore(state) == 1
    np.testing.assert_array_equal(state["optimizer"]["m"], weights(1)["optimizer"]["m"])
    assert tries == [1, 2]


@pytest.mark.parametrize("leave", [away, unmounted])
def test_a_store_that_stays_away_ends_the_rank_with_80(
    rank: Rank,
    tmp_path: Path,
    leave: Callable[[Path], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    leave(tmp_path)
    more = {"EVERSTEP_STEP_TIMEOUT_S": BRIEF}
    ck = Checkpointer.from_env(rank.environ(attempt=2, restore=SPEC, **more))
    with pytest.raises(SystemExit) as end:
        ck.restore(empty())
    assert end.value.code == 80
    assert "rank 0: restore failed" in capfd.readouterr().err.splitlines()[-1]


def test_an_object_that_is_missing_from_a_store_that_is_there_is_damage(
    rank: Rank, tmp_path: Path
) -> None:
    for path in (tmp_path / "store" / keys.data_root("r")).rglob("*.bin"):
        path.unlink()
    more = {"EVERSTEP_STEP_TIMEOUT_S": "60"}
    ck = Checkpointer.from_env(rank.environ(attempt=2, restore=SPEC, **more))
    with pytest.raises(SystemExit) as end:
        ck.restore(empty())
    assert end.value.code == 79


@pytest.mark.parametrize(("step_s", "patience_s"), [("2", 10.0), ("60", LONGEST_WAIT_S)])
def test_the_wait_for_a_store_is_shorter_than_a_restore_may_take(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, step_s: str, patience_s: float
) -> None:
    allowed: list[float] = []

    def once(waits_s: float, action: Callable[[], int]) -> int:
        allowed.append(waits_s)
        assert waits_s <= rank.reading().allowed_s / 2
        return action()

    monkeypatch.setattr(restoring, "_once_there", once)
    more = {"EVERSTEP_STEP_TIMEOUT_S": step_s}
    Checkpointer.from_env(rank.environ(attempt=2, restore=SPEC, **more)).restore(empty())
    assert allowed == [patience_s]
