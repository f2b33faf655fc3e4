"""Speed of the training job: ``python -m tests.bench.train [--quick] [--json]``.

One process, one thread. What is compared runs in turn in the same process, and the medians count,
so a neighbour on the machine slows both.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import silu

from checkpointing import Checkpointer, slot
from jobs.data.corpus import load_corpus
from jobs.data.order import plan_batches
from jobs.moe.config import PRESETS
from jobs.moe.model import MoETransformer
from jobs.optim.schedule import Schedule, ScheduleKind
from jobs.train import Keeper, NoKeeper, Recipe, Trainer

STEPS = 10_000


class LinearExpert(nn.Module):
    """One SwiGLU expert as it is usually written."""

    def __init__(self, dim, width):
        super().__init__()
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


class LoopLayer(nn.Module):
    """The peer: a Python loop over nn.Linear experts, masks and index_add."""

    def __init__(self, router, dim, width, experts):
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(LinearExpert(dim, width) for _ in range(experts))
        self.load_e = None

    def forward(self, x_bsd):
        x = x_bsd.reshape(-1, x_bsd.shape[-1])
        routing = self.router(x)
        self.load_e = routing.load_e
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tokens, choice = torch.where(routing.ids_tk == e)
            out.index_add_(0, tokens, expert(x[tokens]) * routing.gates_tk[tokens, choice, None])
        return out.view_as(x_bsd)


class LoopTransformer(MoETransformer):
    """The same model with the peer's layers."""

    def __init__(self, config, *, max_seq, seed):
        super().__init__(config, max_seq=max_seq, seed=seed)
        for block in self.blocks:
            block.moe = LoopLayer(block.moe.router, config.dim, config.expert_dim, config.experts)

    def moe_layers(self):
        return (block.moe for block in self.blocks)


def trainer(build: Callable[..., MoETransformer]) -> tuple[Trainer, int]:
    """A trainer of the demo preset in a world of one, and its tokens a step."""
    preset = PRESETS["demo"]
    model = build(preset.model, max_seq=preset.seq, seed=1)
    batches = plan_batches(
        load_corpus(None, vocabulary=256),
        seed=1,
        batch=preset.batch,
        seq=preset.seq,
        rank=0,
        world=1,
        vocabulary=256,
    )
    schedule = Schedule(kind=ScheduleKind.COSINE, peak=preset.lr, steps=STEPS, warmup=20)
    recipe = Recipe(seed=1, schedule=schedule, clip=1.0, world=1)
    return Trainer(model, batches, recipe), preset.batch * preset.seq


def timed(work: Callable[[int], None], first: int, count: int) -> list[float]:
    """Seconds of each of `count` calls."""
    taken = []
    for i in range(first, first + count):
        started = time.perf_counter()
        work(i)
        taken.append(time.perf_counter() - started)
    return taken


def in_turn(works: list[Callable[[int], None]], rounds: int, per_round: int) -> list[float]:
    """Median seconds of each work, measured in alternating rounds after one warm-up round."""
    taken: list[list[float]] = [[] for _ in works]
    for turn in range(rounds + 1):
        for i, work in enumerate(works):
            measured = timed(work, turn * per_round, per_round)
            taken[i] += measured if turn else []
    return [statistics.median(times) for times in taken]


def row(figure, value, unit, peer, peer_value, target, met) -> dict[str, object]:
    return {
        "figure": figure,
        "value": round(value, 4),
        "unit": unit,
        "peer": peer,
        "peer_value": round(peer_value, 4),
        "ratio": round(value / peer_value, 4),
        "target": target,
        "met": met,
    }


def experts_row(rounds: int) -> dict[str, object]:
    """Tokens a second beside the loop of nn.Linear experts."""
    (grouped, tokens), (looped, _) = trainer(MoETransformer), trainer(LoopTransformer)
    ours_s, peer_s = in_turn([grouped.run_step, looped.run_step], rounds, 10)
    return row(
        "demo preset, one thread",
        tokens / ours_s,
        "tokens/s",
        "the same model with a Python loop of nn.Linear experts",
        tokens / peer_s,
        "ratio >= 1",
        ours_s <= peer_s,
    )


def heartbeat_row(rounds: int) -> dict[str, object]:
    """Seconds a step costs with a Checkpointer that saves nothing, beside the bare loop."""
    beating, _ = trainer(MoETransformer)
    bare, _ = trainer(MoETransformer)
    with tempfile.TemporaryDirectory() as folder:
        keeper = live_keeper(Path(folder), beating)

        def step_of(which: Trainer, keeper: Keeper) -> Callable[[int], None]:
            def step(i: int) -> None:
                record = which.run_step(i)
                keeper.step(
                    record.step, which.state, which.local(), loss=record.loss, tokens=record.tokens
                )

            return step

        # One step each in turn: what is looked for is smaller than the drift of a round of ten.
        works = [step_of(beating, keeper), step_of(bare, NoKeeper())]
        ours_s, peer_s = in_turn(works, rounds * 20, 1)
    return row(
        "step with heartbeats",
        ours_s * 1000,
        "ms",
        "the bare loop",
        peer_s * 1000,
        "ratio <= 1.01",
        ours_s <= 1.01 * peer_s,
    )


def live_keeper(folder: Path, of: Trainer) -> Keeper:
    """A Checkpointer on a real slot whose interval is never reached."""
    slot.create(folder / "slot")
    view = slot.SlotView(folder / "slot")
    view.set_control(slot.Control(interval_steps=0))
    view.close()
    os.environ |= {
        "EVERSTEP_RUN": "bench",
        "EVERSTEP_ATTEMPT": "1",
        "EVERSTEP_NODE": "here",
        "EVERSTEP_SLOT": str(folder / "slot"),
        "EVERSTEP_ARENA": str(folder / "arena"),
        "EVERSTEP_STORE": json.dumps({"url": (folder / "store").as_uri()}),
        "EVERSTEP_RESTORE": "null",
        "EVERSTEP_STEP_TIMEOUT_S": "60",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    keeper = Checkpointer.from_env()
    assert keeper.restore(of.state(), local=of.local()) == 0
    return keeper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a coarse answer within a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rounds = 4 if options.quick else 40
    rows = [experts_row(rounds), heartbeat_row(rounds)]
    for r in rows:
        print(
            f"{r['figure']}: {r['value']} {r['unit']}; {r['peer']}: {r['peer_value']}; "
            f"ratio {r['ratio']} ({r['target']}: {'met' if r['met'] else 'missed'})"
        )
    if options.json:
        print(json.dumps({"bench": "train", "rows": rows}))


if __name__ == "__main__":
    main()
