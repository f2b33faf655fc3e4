"""What checkpoints cost: ``python -m tests.bench.checkpoint [--quick] [--large] [--json]``.

Two ranks, as real processes, hold the state of a transformer with AdamW: 1 GiB, 4 with `--large`.
The S3 server is SeaweedFS on loopback, its data on a disk. What is compared runs in turn against
the same server, and the medians count, after one warm-up. Peers that are no dependencies are
installed into an environment of their own. `--quick` takes a small state and leaves those out.
Saves copy before they return, as they do by default; rows that overlap them say so. `--only`
measures the rows of one name, so that the bench can be run in pieces.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

from checkpointing.errors import CheckpointingError
from deploy.demo.s3_server import ServerError
from deploy.devcluster.lifecycle import stop_on_signals
from tests.bench.checkpoint import beside, copies, memory, rivals, rows, small, staging, transfers
from tests.bench.checkpoint.children import Failed
from tests.bench.checkpoint.node import Setup
from tests.bench.checkpoint.rows import Row, Target

QUICK = "left out by --quick"
ERRORS = (Failed, ServerError, CheckpointingError, OSError, subprocess.SubprocessError)


class Part(NamedTuple):
    """A module that measures some figures in one go."""

    figures: Sequence[str]
    targets: Callable[[Setup], dict[str, list[Target]]]
    measure: Callable[[Setup, AbstractSet[str]], list[Row]]
    is_quick: bool = True


PARTS = (
    Part(staging.FIGURES, staging.targets, staging.measure),
    Part(rivals.FIGURES, rivals.targets, rivals.measure, is_quick=False),
    Part(transfers.FIGURES, transfers.targets, transfers.measure),
    Part(beside.FIGURES, beside.targets, beside.measure),
    Part(memory.FIGURES, memory.targets, memory.measure, is_quick=False),
    Part(copies.FIGURES, copies.targets, copies.measure),
    Part(small.FIGURES, small.targets, small.measure),
)
FIGURES = tuple(figure for part in PARTS for figure in part.figures)


def measured(part: Part, setup: Setup, only: Sequence[str]) -> list[Row]:
    """Return the rows of a part; what failed becomes rows that say why."""
    wanted = set(part.figures) & set(only or part.figures)
    if not wanted:
        return []
    targets = part.targets(setup)
    aims = [aim for figure in part.figures if figure in wanted for aim in targets[figure]]
    if setup.quick and not part.is_quick and not only:
        return [rows.missing(aim, QUICK) for aim in aims]
    setup.say(f"{', '.join(sorted(wanted))}; load {os.getloadavg()[0]:.1f}")
    try:
        return part.measure(setup, wanted)
    except ERRORS as error:
        setup.say(f"  not measured: {error}")
        return [rows.missing(aim, str(error) or type(error).__name__) for aim in aims]


def main() -> None:
    options = _options()
    stop_on_signals()
    found: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
            setup = Setup(
                mib=options.mib,
                repeats=options.repeat,
                quick=options.quick,
                folder=Path(name),
                say=say,
                peers=options.peers,
            )
            for part in PARTS:
                found += measured(part, setup, options.only or ())
    except KeyboardInterrupt:
        sys.exit(130)
    say("")
    for row in found:
        say(rows.line(row))
    if options.json:
        say(json.dumps({"bench": "checkpoint", "rows": found}))


def say(text: str) -> None:
    print(text, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.checkpoint", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a coarse answer within a minute")
    parser.add_argument("--large", action="store_true", help="a state of 4 GiB, not 1")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--only", action="append", choices=FIGURES, help="this one; repeatable")
    parser.add_argument(
        "--peers", type=Path, help="folder of an environment with the peers, made if there is none"
    )
    parser.add_argument("--mib", type=int, help="size of the state")
    parser.add_argument("--repeat", type=int, help="medians of so many")
    options = parser.parse_args()
    if options.mib is None:
        options.mib = 4096 if options.large else 128 if options.quick else 1024
    if options.repeat is None:
        options.repeat = 2 if options.quick else 5
    if options.mib < 16 or options.repeat < 1:
        parser.error("--mib must be 16 or more, --repeat 1 or more")
    return options


if __name__ == "__main__":
    main()
