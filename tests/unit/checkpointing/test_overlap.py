"""Copies that run beside training: fenced, consistent, or not counted."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpointing import Checkpointer
from checkpointing.errors import StageError
from checkpointing.stage import crew
from checkpointing.stage.copying import Copy
from checkpointing.stage.stager import Stager
from tests.unit.checkpointing.ranks import Rank

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


class Gate:
    """Holds the copies up that run beside training."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.waiting = threading.Event()
        for name in ("_copy_block", "_copy_small"):
            real = getattr(Copy, name)

            def held(copy: Copy, *args: Any, real: Any = real) -> None:
                if threading.current_thread() is not threading.main_thread():
                    self.waiting.set()
                    assert self._open.wait(20)
                real(copy, *args)

            patch.setattr(Copy, name, held)

    def open(self) -> None:
        self._open.set()

    def open_soon(self) -> None:
        threading.Timer(0.05, self.open).start()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(crew, "share_of_cores", lambda _: 1)
    monkeypatch.setattr("checkpointing.stage.stager.share_of_cores", lambda _: 1)
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


class Trainee:
    """A model with a buffer that changes in every forward."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.plain = {"seen": 0, "array": np.zeros(9)}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "plain": self.plain}

    def forward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 64)).square().sum().backward()

    def train(self) -> None:
        self.forward()
        self.optimizer.step()
        self.plain["seen"] += 1
        self.plain["array"] += 1

    def content(self) -> dict[str, bytes]:
        found = {name: t.numpy().tobytes() for name, t in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}/{key}": t.numpy().tobytes() for key, t in state.items()}
        return {**found, "plain": repr(self.plain).encode()}


def restored(rank: Rank, step: int) -> dict[str, bytes]:
    other = Trainee(seed=9)
    assert Checkpointer.from_env(rank.from_memory(step)).restore(other.state) == step
    return other.content()


def test_a_save_beside_training_is_the_state_at_the_boundary(rank: Rank, gate: Gate) -> None:
    trainee = Trainee()
    ck = Checkpointer.from_env(rank.environ(), overlap=True)
    ck.restore(trainee.state)
    trainee.train()
    ck.step(1, trainee.state)
    wanted = trainee.content()
    assert rank.steps() == [], "nothing counts before it is whole"
    trainee.forward()  # changes the buffers
    trainee.plain["array"] += 5
    assert trainee.content() != wanted
    gate.open_soon()
    trainee.optimizer.step()  # its hook waits
    assert rank.steps() == [1]
    ck.step(2)
    assert rank.reading().dropped_saves == 0
    assert restored(rank, 1) == wanted


def test_training_goes_on_while_the_copy_runs(rank: Rank, gate: Gate) -> None:
    trainee = Trainee()
    trainee.train()
    ck = Checkpointer.from_env(rank.environ(), overlap=True)
    ck.restore(trainee.state)
    ck.step(1, trainee.state)
    assert gate.waiting.wait(20)
    trainee.forward()
    stepped = threading.Event()

    def step() -> None:
        trainee.optimizer.step()
        stepped.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not stepped.wait(0.1), "the optimizer waits for the copy"
    gate.open()
    thread.join(20)
    assert stepped.is_set()


def test_optimizers_that_the_state_does_not_name_are_guarded_when_told(
    rank: Rank, gate: Gate
) -> None:
    trainee = Trainee()
    trainee.train()
    ck = Checkpointer.from_env(rank.environ(), overlap=True)
    ck.guard(trainee.optimizer)
    model = dict(trainee.model.state_dict())
    ck.restore({"model": model})
    ck.step(1, {"model": model})
    wanted = {name: tensor.clone() for name, tensor in model.items()}
    trainee.forward()
    gate.open_soon()
    trainee.optimizer.step()
    kept = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    Checkpointer.from_env(rank.from_memory(1)).restore({"model": kept})
    assert all(torch.equal(kept[name], wanted[name]) for name in kept)


def test_without_optimizer_or_fence_nothing_is_copied_late(rank: Rank, gate: Gate) -> None:
    ck = Checkpointer.from_env(rank.environ(), overlap=True)
    state = {"w": torch.zeros(100)}
    ck.restore(state)
    ck.step(1, state)
    assert rank.steps() == [1]
    assert not gate.waiting.is_set()


def test_a_script_with_its_own_fence_overlaps(rank: Rank, gate: Gate) -> None:
    ck = Checkpointer.from_env(rank.environ(), overlap=True)
    state = {"w": torch.zeros(100), "v": np.zeros(50)}
    ck.restore(state)
    ck.fence()
    ck.step(1, state)
    gate.open()
    assert rank.steps() == []
    ck.fence()
    assert rank.steps() == [1]
    state["w"] += 1
    ck.step(2, state)
    ck.fence()
    assert rank.steps() == [2, 1]


def test_a_forgotten_fence_costs_the_save_and_is_said(
    rank: Rank, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    ck = Checkpointer.from_env(rank.environ(), overlap=True)
    state = {"w": np.zeros(100)}
    ck.restore(state)
    ck.fence()
    ck.step(1, state)
    gate.open()
    state["w"] += 1
    ck.step(2, state)
    assert rank.steps() == [2], "step 1 may be mixed and does not count"
    assert rank.reading().dropped_saves == 1
    assert "nobody called fence()" in caplog.text
    ck.step(3, state)
    assert rank.steps() == [3, 2], "from now on at once"


def test_a_change_that_no_hook_saw_costs_the_save_and_is_said(
    rank: Rank, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    trainee = Trainee()
    trainee.train()
    ck = Checkpointer.from_env(rank.environ(), overlap=True)
    ck.restore(trainee.state)
    ck.step(1, trainee.state)
    with torch.no_grad():
        trainee.model[0].weight.add_(1)
    gate.open()
    ck.step(2, trainee.state)
    ck.step(3)
    assert rank.steps() == [2]
    assert "model/0.weight" in caplog.text
    assert rank.reading().dropped_saves == 1


def test_the_debug_mode_finds_what_torch_does_not_count(rank: Rank, gate: Gate) -> None:
    trainee = Trainee()
    trainee.train()
    ck = Checkpointer.from_env(rank.environ(EVERSTEP_STAGE_DEBUG="1"), overlap=True)
    ck.restore(trainee.state)
    ck.step(1, trainee.state)
    gate.open()
    trainee.train()
    ck.step(2)
    assert rank.steps() == [1], "what did not change counts"
    ck.step(3, trainee.state)
    trainee.forward()
    trainee.model[0].weight.data[3, 4] += 1
    with pytest.raises(StageError, match=r"step 3 does not count.*model/0\.weight"):
        trainee.optimizer.step()
    assert rank.steps() == [1]


def test_the_debug_mode_finds_what_changed_before_it_was_copied(rank: Rank, gate: Gate) -> None:
    trainee = Trainee()
    trainee.train()
    ck = Checkpointer.from_env(rank.environ(EVERSTEP_STAGE_DEBUG="1"), overlap=True)
    ck.restore(trainee.state)
    ck.step(1, trainee.state)
    trainee.forward()
    trainee.model[0].weight.data[3, 4] += 1
    gate.open()
    with pytest.raises(StageError, match=r"step 1 does not count.*model/0\.weight"):
        trainee.optimizer.step()
    assert rank.steps() == []


def test_a_planned_stop_is_staged_when_the_loop_is_told(rank: Rank) -> None:
    from checkpointing.slot import Control

    trainee = Trainee()
    trainee.train()
    rank.view.set_control(Control(interval_steps=0, stop_step=1))
    ck = Checkpointer.from_env(rank.environ(), overlap=True)
    ck.restore(trainee.state)
    ck.step(1, trainee.state)
    assert ck.should_stop
    assert rank.steps() == [1]


def test_finish_lands_what_still_flies(rank: Rank, gate: Gate) -> None:
    trainee = Trainee()
    trainee.train()
    ck = Checkpointer.from_env(rank.environ(), overlap=True)
    ck.restore(trainee.state)
    ck.step(1, trainee.state)
    gate.open_soon()
    ck.finish(1, trainee.state)
    assert rank.steps() == [1]
    assert rank.reading().saves == 1


def test_the_threads_of_torch_stay_as_they_are(rank: Rank) -> None:
    before = torch.get_num_threads(), torch.get_num_interop_threads()
    trainee = Trainee()
    ck = Checkpointer.from_env(rank.environ(), overlap=True)
    ck.restore(trainee.state)
    for step in range(1, 5):
        trainee.train()
        ck.step(step, {**trainee.state, "odd": torch.zeros(300, 300).t()})
    ck.finish(4)
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == before


def test_an_error_of_a_copy_is_raised_and_leaves_no_slot(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainee = Trainee()
    trainee.train()
    real = Copy._copy_small

    def broken(copy: Copy, *args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("the copy fails")
        real(copy, *args)

    monkeypatch.setattr("checkpointing.stage.stager.share_of_cores", lambda _: 1)
    monkeypatch.setattr(Copy, "_copy_small", broken)
    again = Checkpointer.from_env(rank.environ(), overlap=True)
    again.restore(trainee.state)
    again.step(1, trainee.state)
    with pytest.raises(OSError, match="the copy fails"):
        again.step(2)
    assert rank.steps() == []


KILLED = """
import sys, threading
from pathlib import Path
import numpy as np
from checkpointing.stage.copying import Copy
from checkpointing.stage.stager import Stager
stager = Stager(Path(sys.argv[1]), attempt=1, rank=0, world=1)
state = {f"w{n}": np.full(100_000, 1, np.uint8) for n in range(20)}
stager.stage(1, state, None)
real, copied = Copy._copy_block, []
def block(copy, *args):
    real(copy, *args)
    copied.append(args)
    if len(copied) == int(sys.argv[2]):
        print("in mid-copy", flush=True)
        threading.Event().wait()
Copy._copy_block = block
for array in state.values():
    array[:] = 2
stager.begin(2, state, None, late=None)
stager.fence()
"""


@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_rank_killed_in_mid_copy_leaves_a_slot_that_counts_for_nothing(
    rank: Rank, after: int
) -> None:
    command = [sys.executable, "-c", KILLED, str(rank.arena), str(after)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"in mid-copy\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert rank.steps() == [1]
    kept = {f"w{n}": np.zeros(100_000, np.uint8) for n in range(20)}
    assert Checkpointer.from_env(rank.from_memory(1)).restore(kept) == 1
    assert all(set(array.tolist()) == {1} for array in kept.values())
    successor = Stager(rank.arena, attempt=2, rank=0, world=1)
    successor.stage(3, kept, None)
    assert rank.steps() == [3, 1], "its place is used again"


def test_cores_are_shared_among_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew.os, "sched_getaffinity", lambda _: set(range(12)))
    assert [crew.share_of_cores(n) for n in (0, 1, 4, 8, 99)] == [12, 12, 3, 1, 1]
