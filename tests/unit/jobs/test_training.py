import json
import os
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.errors import NonFiniteLoss, UsageError
from jobs.train import NoKeeper, train
from tests.ports import held_port
from tests.unit.jobs.small_runs import STEPS, FolderKeeper, build, load, save

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]


class Silent:
    """Outputs that keep what they are told."""

    def __init__(self):
        self.records, self.final = [], None

    def record(self, record):
        self.records.append(record)

    def finish(self, **fields):
        self.final = fields


def run_ranks(size, folder, output):
    """Run `size` gloo processes of small_runs and return final.json."""
    base = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    base |= {"EVERSTEP_OUTPUT": str(output), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.jobs.small_runs", str(folder)]
    with held_port() as port, ExitStack() as stack:
        base["MASTER_PORT"] = str(port)
        ranks = [
            subprocess.Popen(command, cwd=ROOT, env={**base, "RANK": str(r), "LOCAL_RANK": str(r)})
            for r in range(size)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        assert [rank.wait(timeout=100) for rank in ranks] == [0] * size
    return json.loads((output / "final.json").read_text())


def test_loss_falls_on_the_tiny_preset():
    trainer = build(steps=60)
    losses = [trainer.run_step(step).loss for step in range(60)]
    assert losses[0] == pytest.approx(np.log(256), abs=0.5)
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.7


def test_same_run_twice_gives_the_same_bits():
    digests = []
    for _ in range(2):
        trainer = build()
        for step in range(STEPS):
            trainer.run_step(step)
        digests.append(trainer.digests())
    assert digests[0] == digests[1]


def test_resumed_run_ends_in_the_same_bits_and_random_numbers(tmp_path):
    whole, again = Silent(), Silent()
    train(build(), FolderKeeper(tmp_path, save_at=3), whole, STEPS)
    draws = (torch.rand(3).tolist(), random.random(), np.random.rand())
    train(build(), FolderKeeper(tmp_path, save_at=3), again, STEPS)
    assert [r.step for r in again.records] == [4, 5, 6, 7, 8]
    assert [r.loss for r in again.records] == [r.loss for r in whole.records[3:]]
    assert again.final == whole.final
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == draws


def test_router_bias_and_step_count_are_what_a_resume_needs(tmp_path):
    trainer = build()
    for step in range(3):
        trainer.run_step(step)
    save(tmp_path, trainer.state(), trainer.local())
    other = build()
    load(tmp_path, other.state(), other.local())
    biases = [b for name, b in other.state()["model"].named_buffers() if name.endswith("bias_e")]
    assert biases
    assert all(bool((bias != 0).any()) for bias in biases)
    assert other.tokens == trainer.tokens > 0
    assert other.digests() == trainer.digests()


def test_two_ranks_resume_in_the_same_bits(tmp_path):
    undisturbed = run_ranks(2, tmp_path / "kept", tmp_path / "first")
    resumed = run_ranks(2, tmp_path / "kept", tmp_path / "second")
    lines = (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 5, 6, 7, 8]
    assert resumed == undisturbed


def test_two_ranks_train_like_one_with_the_whole_batch(tmp_path):
    two = run_ranks(2, tmp_path / "kept", tmp_path / "out")
    one = Silent()
    train(build(batch=4), NoKeeper(), one, STEPS)
    assert one.final["tokens"] == two["tokens"]
    assert one.final["loss"] == pytest.approx(two["loss"], rel=1e-3)


@pytest.mark.parametrize("changed", [{"seed": 2}, {"seq": 16}, {"batch": 3}])
def test_resume_with_another_seed_or_shape_of_data_is_refused(tmp_path, changed):
    train(build(), FolderKeeper(tmp_path, save_at=3), Silent(), 3)
    with pytest.raises(UsageError, match="the checkpoint was trained with"):
        train(build(**changed), FolderKeeper(tmp_path, save_at=3), Silent(), STEPS)


def test_non_finite_loss_stops_before_any_weight_changes():
    trainer = build()
    trainer.run_step(0)
    model = trainer.state()["model"]
    with torch.no_grad():
        model.norm.weight[0] = torch.inf
    before = trainer.digests()
    with pytest.raises(NonFiniteLoss, match="step 2: loss nan"):
        trainer.run_step(1)
    assert trainer.digests() == before


def test_steps_without_a_save_build_no_state():
    class Counting(NoKeeper):
        def step(self, step, state=None, local=None, *, loss=0.0, tokens=0):
            assert callable(state)
            seen.append((step, loss, tokens))

    seen = []
    train(build(steps=3), Counting(), Silent(), 3)
    assert [(step, tokens) for step, _, tokens in seen] == [(1, 64), (2, 128), (3, 192)]


def test_planned_stop_leaves_the_loop_without_a_final_file():
    class Stopping(NoKeeper):
        should_stop = True

    outputs = Silent()
    train(build(), Stopping(), outputs, STEPS)
    assert len(outputs.records) == 1
    assert outputs.final is None
