"""Small runs of the tiny preset for the tests, and a keeper that saves one state to a folder."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from checkpointing.tree import flatten, put_back
from jobs.data.corpus import load_corpus
from jobs.data.order import plan_batches
from jobs.moe.config import PRESETS
from jobs.moe.model import MoETransformer
from jobs.optim.schedule import Schedule, ScheduleKind
from jobs.outputs import Outputs
from jobs.rng import seed_everything
from jobs.train import NoKeeper, Recipe, Trainer, train
from jobs.world import World

STEPS = 8


def build(world=1, rank=0, seed=1, steps=STEPS, device="cpu", **changed):
    """A trainer on the standard library, as the command line builds it."""
    preset = PRESETS["tiny"]
    corpus = load_corpus(None, vocabulary=256)
    settings = {"batch": preset.batch, "seq": preset.seq, **changed}
    batches = plan_batches(corpus, seed=seed, rank=rank, world=world, vocabulary=256, **settings)
    seed_everything(seed, rank)
    model = MoETransformer(preset.model, max_seq=batches.seq, seed=seed).to(device)
    schedule = Schedule(kind=ScheduleKind.COSINE, peak=preset.lr, steps=steps, warmup=2)
    return Trainer(model, batches, Recipe(seed=seed, schedule=schedule, clip=1.0, world=world))


def save(folder, state, local):
    """Write a state as plain arrays and JSON."""
    for kind, mapping in (("state", state), ("local", local)):
        flat = flatten(mapping)
        np.savez(
            folder / f"{kind}.npz",
            **{
                n: np.asarray(x.detach() if hasattr(x, "detach") else x)
                for n, x in flat.leaves.items()
            },
        )
        (folder / f"{kind}.json").write_text(json.dumps(flat.skeleton))


def load(folder, state, local):
    """Bring a live state to a saved one, in place."""
    for kind, mapping in (("state", state), ("local", local)):
        leaves = flatten(mapping).leaves
        with np.load(folder / f"{kind}.npz") as saved:
            assert set(saved.files) == set(leaves)
            for name, leaf in leaves.items():
                live = leaf.detach().numpy() if isinstance(leaf, torch.Tensor) else leaf
                live[...] = saved[name]
        put_back(mapping, json.loads((folder / f"{kind}.json").read_text()), leaves)


class FolderKeeper(NoKeeper):
    """Saves at one step; restores when the folder holds a state."""

    def __init__(self, folder, save_at):
        self._folder, self._save_at = Path(folder), save_at
        self._folder.mkdir(parents=True, exist_ok=True)

    def restore(self, state, local=None):
        if not (self._folder / "local.json").exists():
            return 0
        load(self._folder, state, local)
        return self._save_at

    def step(self, step, state=None, local=None, *, loss=0.0, tokens=0):
        if step == self._save_at:
            save(self._folder, state(), local)


def main():
    """One rank: train to the end, from the saved state of this rank when there is one."""
    torch.set_num_threads(1)
    world = World.from_env(os.environ)
    outputs = Outputs(
        world.output, active=world.rank == 0, attempt=1, steps=STEPS, plain=True, log_every=100
    )
    keeper = FolderKeeper(f"{sys.argv[1]}/{world.rank}", save_at=3)
    with world.join("gloo"):
        train(build(world.size, world.rank), keeper, outputs, STEPS)
    outputs.close()


if __name__ == "__main__":
    main()
