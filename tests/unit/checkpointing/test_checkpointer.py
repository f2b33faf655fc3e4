import json
import logging
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointing import Checkpointer, slot
from checkpointing.checkpointer import RankEnvironment
from checkpointing.slot import Control, Phase, SlotReading, SlotView
from checkpointing.stage import admission
from checkpointing.stage.arena import MappedArena, UploadState, peek
from checkpointing.store.base import StoreConfig
from tests.unit.checkpointing.saved import save, store_at


class Agent:
    """The slot, the arena and the environment of rank 0 of 1."""

    def __init__(self, folder: Path) -> None:
        self.slot, self.arena = folder / "slot-0", folder / "arena-0"
        slot.create(self.slot)
        self.view = SlotView(self.slot)
        self.store = StoreConfig(url=(folder / "store").as_uri())

    def environ(self, attempt: int = 1, restore: object = None, **more: str) -> dict[str, str]:
        return {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "EVERSTEP_RUN": "r",
            "EVERSTEP_ATTEMPT": str(attempt),
            "EVERSTEP_SLOT": str(self.slot),
            "EVERSTEP_ARENA": str(self.arena),
            "EVERSTEP_STORE": self.store.to_json(),
            "EVERSTEP_RESTORE": json.dumps(restore),
            "EVERSTEP_STEP_TIMEOUT_S": "3",
            **more,
        }

    def reading(self) -> SlotReading:
        reading = self.view.read()
        assert reading is not None
        return reading

    def steps(self) -> list[int]:
        return [staged.step for staged in peek(self.arena)]

    def uploaded(self) -> None:
        arena = MappedArena(self.arena)
        for staged in arena.staged():
            arena.headers[staged.index].mark(staged.sequence, UploadState.UPLOADED)
        arena.close()


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    """The guard is for ranks: let this process end by SIGTERM as before."""
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


def _state() -> dict[str, Any]:
    return {"w": np.arange(10.0), "n": 1}


def test_outside_everstep_it_is_inert_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ck = Checkpointer.from_env({})
    assert len(caplog.records) == 1
    assert ck.restore(_state()) == 0
    ck.step(1, _state(), loss=1.0)
    with ck.phase("eval", allowed_s=5):
        pass
    ck.finish(1, _state())
    assert not ck.should_stop


def test_the_heartbeat_follows_the_script(agent: Agent) -> None:
    ck = Checkpointer.from_env(agent.environ())
    assert agent.reading().phase is Phase.INIT
    assert ck.restore(_state()) == 0
    first = agent.reading()
    assert (first.phase, first.step) == (Phase.STEP, -1)
    assert first.allowed_s == 30
    ck.step(1, loss=2.5, tokens=64)
    after = agent.reading()
    assert (after.step, after.loss, after.tokens) == (1, 2.5, 64)
    assert after.allowed_s == 3
    assert math.isnan(after.step_s), "the first step warms up and is not counted"
    ck.step(2)
    assert agent.reading().step_s >= 0
    assert math.isnan(agent.reading().loss)
    with ck.phase("eval", allowed_s=600):
        assert (agent.reading().phase, agent.reading().allowed_s) == (Phase.EVAL, 600)
    assert agent.reading().phase is Phase.STEP
    ck.finish(2)
    assert agent.reading().phase is Phase.FINISH


def test_saves_happen_at_multiples_of_the_interval(agent: Agent) -> None:
    agent.view.set_control(Control(interval_steps=3))
    ck = Checkpointer.from_env(agent.environ())
    ck.restore(_state())
    for step in range(1, 8):
        ck.step(step, _state)
        agent.uploaded()
    assert agent.steps() == [6, 3]
    assert agent.reading().saves == 2
    assert agent.reading().stall_s > 0


def test_a_new_interval_holds_from_its_effective_step(agent: Agent) -> None:
    agent.view.set_control(Control(interval_steps=4))
    ck = Checkpointer.from_env(agent.environ())
    ck.restore(_state())
    for step in range(1, 10):
        if step == 2:
            agent.view.set_control(Control(interval_steps=3, effective_step=6))
        ck.step(step, _state())
        if agent.arena.exists():
            agent.uploaded()
        if step == 4:
            assert agent.steps() == [4]
        if step == 6:
            assert agent.steps() == [6, 4]
    assert agent.steps() == [9, 6]


def test_without_control_nothing_is_saved_but_the_end(agent: Agent) -> None:
    ck = Checkpointer.from_env(agent.environ())
    ck.restore(_state())
    for step in range(1, 4):
        ck.step(step, _state())
    assert agent.steps() == []
    ck.finish(3, _state())
    assert agent.steps() == [3]


def test_a_busy_arena_skips_and_counts(agent: Agent) -> None:
    agent.view.set_control(Control(interval_steps=1))
    ck = Checkpointer.from_env(agent.environ())
    ck.restore(_state())
    called = []

    def state() -> dict[str, Any]:
        called.append(1)
        return _state()

    for step in range(1, 5):
        ck.step(step, state)
    assert agent.steps() == [2, 1]
    assert agent.reading().skipped_saves == 2
    assert len(called) == 2, "a skipped save builds no state"


def test_a_planned_stop_saves_and_tells_the_loop(agent: Agent) -> None:
    agent.view.set_control(Control(interval_steps=100, snapshot_step=2, stop_step=4))
    ck = Checkpointer.from_env(agent.environ())
    ck.restore(_state())
    done = 0
    for step in range(1, 10):
        ck.step(step, _state())
        done = step
        if ck.should_stop:
            break
    assert done == 4
    assert agent.steps() == [4, 2]
    ck.finish(done, _state())
    assert agent.reading().saves == 2, "what is staged is not staged again"


def test_a_planned_stop_is_not_missed_by_a_script_that_counts_in_tens(agent: Agent) -> None:
    agent.view.set_control(Control(interval_steps=0, stop_step=13))
    ck = Checkpointer.from_env(agent.environ())
    ck.restore(_state())
    ck.step(10, _state())
    assert not ck.should_stop
    ck.step(20, _state())
    assert ck.should_stop
    ck.step(30, _state())
    assert agent.steps() == [20], "a script that goes on is not held up again"


def test_memory_restores_state_and_own_state(agent: Agent) -> None:
    agent.view.set_control(Control(interval_steps=2))
    ck = Checkpointer.from_env(agent.environ())
    ck.restore({"w": np.zeros(10), "n": 0}, {"seed": (0,)})
    ck.step(2, {"w": np.arange(10.0), "n": 7}, {"seed": (4, 5)})
    spec = {"step": 2, "attempt": 1, "source": "memory"}
    second = Checkpointer.from_env(agent.environ(attempt=2, restore=spec))
    state, own = {"w": np.zeros(10), "n": 0}, {"seed": (0,)}
    kept = state["w"]
    assert second.restore(state, own) == 2
    assert state["w"] is kept
    assert kept.tolist() == list(range(10))
    assert state["n"] == 7
    assert own == {"seed": (4, 5)}
    assert agent.reading().step == 2
    assert agent.steps() == [2], "the arena is kept for the next restart"


def test_plain_values_that_a_function_makes_anew_are_not_restored_in_silence(
    agent: Agent, capfd: pytest.CaptureFixture[str]
) -> None:
    agent.view.set_control(Control(interval_steps=2))
    ck = Checkpointer.from_env(agent.environ())
    ck.restore(_state())
    ck.step(2, {"w": np.arange(10.0), "n": 7})
    environ = agent.environ(attempt=2, restore={"step": 2, "attempt": 1, "source": "memory"})
    weights, kept = np.zeros(10), {"w": np.zeros(10), "n": 0}
    assert Checkpointer.from_env(environ).restore(lambda: kept) == 2
    assert kept["n"] == 7
    with pytest.raises(SystemExit) as end:
        Checkpointer.from_env(environ).restore(lambda: {"w": weights, "n": 0})
    assert end.value.code == 77
    assert "give a mapping" in capfd.readouterr().err


@pytest.mark.parametrize(
    "spec",
    [
        {"step": 2, "attempt": 1, "source": "memory"},
        {"step": 2, "attempt": 1, "source": "store"},
        {"step": 2, "attempt": 1, "source": "tape"},
        {"step": 2},
    ],
)
def test_what_cannot_be_restored_ends_with_77_and_one_line(
    agent: Agent, spec: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    save(store_at(agent.slot.parent / "store"), "r", 1)
    ck = Checkpointer.from_env(agent.environ(restore=spec))
    with pytest.raises(SystemExit) as end:
        ck.restore(_state())
    assert end.value.code == 77
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_too_little_memory_ends_with_78_before_the_first_step(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admission, "room_for", lambda _: {"cgroup memory.max": 5})
    ck = Checkpointer.from_env(agent.environ())
    with pytest.raises(SystemExit) as end:
        ck.restore(_state())
    assert end.value.code == 78
    (line,) = capfd.readouterr().err.splitlines()
    assert "cgroup memory.max has 0.00 GiB left" in line


def test_a_state_that_cannot_be_kept_is_the_scripts_mistake(agent: Agent) -> None:
    spec = {"step": 2, "attempt": 1, "source": "memory"}
    ck = Checkpointer.from_env(agent.environ(restore=spec))
    with pytest.raises(TypeError, match="a/b"):
        ck.restore({"a": {"b": {1, 2}}})


def test_the_environment_names_what_is_missing() -> None:
    with pytest.raises(KeyError, match="EVERSTEP_RUN"):
        RankEnvironment.read({"EVERSTEP_SLOT": "/x"})


@pytest.mark.torch
def test_modules_and_optimizers_are_restored_bit_for_bit(agent: Agent) -> None:
    torch = pytest.importorskip("torch")
    agent.view.set_control(Control(interval_steps=1))

    def make(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
        return model, optimizer

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()

    model, optimizer = make(0)
    ck = Checkpointer.from_env(agent.environ())
    own = {"rng": torch.get_rng_state()}
    ck.restore({"model": model, "optimizer": optimizer}, own)
    train(model, optimizer)
    own["rng"] = torch.get_rng_state()
    ck.step(1, {"model": model, "optimizer": optimizer}, own)
    train(model, optimizer)

    other, other_optimizer = make(1)
    other_own = {"rng": torch.get_rng_state()}
    spec = {"step": 1, "attempt": 1, "source": "memory"}
    again = Checkpointer.from_env(agent.environ(attempt=2, restore=spec))
    assert again.restore({"model": other, "optimizer": other_optimizer}, other_own) == 1
    torch.set_rng_state(other_own["rng"])
    train(other, other_optimizer)
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
