"""Command line of the job: ``python -m jobs.moe --preset demo --steps 300``.

It runs under everstep, under torchrun, or as a single process. Exit codes: 0 finished or stopped as
planned, 1 outputs cannot be written, 2 wrong flags or data, 3 the loss is not finite, 77 and 78
from the checkpointer.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jobs.data.corpus import load_corpus
from jobs.data.order import Batches, plan_batches
from jobs.errors import JobError
from jobs.moe.config import PRESETS, Preset
from jobs.optim.schedule import Schedule, ScheduleKind
from jobs.world import World


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _rate(text: str) -> float:
    number = float(text)
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags; exits with 2 and one line when one is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.moe", description="Train a byte-level mixture-of-experts transformer."
    )
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="demo", help="model and its defaults")
    add("--steps", type=_positive, help="length of the run")
    add("--seed", type=int, default=1, help="of weights, sample order and random numbers")
    add(
        "--data",
        type=Path,
        help="text file or folder, .npy or .bin (uint16) tokens; "
        "default: the sources of Python's standard library",
    )
    add("--batch", type=_positive, help="sequences of one rank in one step")
    add("--seq", type=_positive, help="tokens of one sequence")
    add("--lr", type=_rate, help="highest learning rate")
    add("--schedule", choices=[kind.value for kind in ScheduleKind], default="cosine")
    add("--clip", type=_rate, default=1.0, help="largest norm of the gradient")
    add("--backend", choices=["auto", "gloo", "nccl"], default="auto")
    add("--threads", type=_positive, default=1, help="CPU threads of one rank")
    add("--plain", action="store_true", help="log lines instead of one line that is rewritten")
    add("--log-every", type=_positive, default=10, help="steps between two log lines")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Open the data, then load torch and train.

    Raises:
        JobError: with the exit code to leave with.
    """
    world = World.from_env(os.environ)
    preset = PRESETS[options.preset]
    batches = plan_batches(
        load_corpus(options.data, vocabulary=preset.model.vocabulary),
        seed=options.seed,
        batch=options.batch or preset.batch,
        seq=options.seq or preset.seq,
        rank=world.rank,
        world=world.size,
        vocabulary=preset.model.vocabulary,
    )
    _train(options, preset, world, batches)


def _train(options: argparse.Namespace, preset: Preset, world: World, batches: Batches) -> None:
    import torch  # mistakes in flags and data are told without it

    from checkpointing import Checkpointer
    from jobs.moe.model import MoETransformer
    from jobs.outputs import Outputs
    from jobs.rng import seed_everything
    from jobs.train import Recipe, Trainer, train

    # The number of threads decides the order of sums, so it must not follow the machine.
    torch.set_num_threads(options.threads)
    steps = options.steps or preset.steps
    schedule = Schedule(
        kind=ScheduleKind(options.schedule),
        peak=options.lr or preset.lr,
        steps=steps,
        warmup=min(preset.warmup, steps),
    )
    with world.join(options.backend) as device:
        seed_everything(options.seed, world.rank)
        model = MoETransformer(preset.model, max_seq=batches.seq, seed=options.seed).to(device)
        recipe = Recipe(seed=options.seed, schedule=schedule, clip=options.clip, world=world.size)
        outputs = Outputs(
            world.output,
            active=world.rank == 0,
            attempt=world.attempt,
            steps=steps,
            plain=options.plain,
            log_every=options.log_every,
        )
        train(Trainer(model, batches, recipe), Checkpointer.from_env(), outputs, steps)
        outputs.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job and return its exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    options = parse(arguments)
    try:
        run(options)
    except JobError as error:
        sys.stderr.write(f"jobs.moe: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
