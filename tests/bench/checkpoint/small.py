"""Very many small tensors: the plan and what is written about them, beside DCP's."""

import statistics
import tempfile
from collections.abc import Set as AbstractSet

from tests.bench.checkpoint import rows
from tests.bench.checkpoint.children import Child
from tests.bench.checkpoint.node import Setup
from tests.bench.checkpoint.rows import Row, Target

FIGURES = ("small",)
_COUNT = 100_000
_QUICK_COUNT = 10_000
_PEER = "DCP without the data"
_MEMORY = "/dev/shm"
Answer = dict[str, float]


def targets(setup: Setup) -> dict[str, list[Target]]:
    """Return what is measured here, by figure."""
    what = f"{_count(setup):,} tensors of 64 bytes"
    return {
        "small": [
            Target(figure=f"plan, index and commit of {what}", peer=_PEER, limit=0.2),
            Target(figure=f"first plan of {what}", peer="DCP's", limit=0.2),
            Target(figure=f"index and commit of {what}", peer="DCP's global plan, .metadata"),
            Target(
                figure=f"commit check and manifest of {what}", peer="DCP's .metadata", limit=0.2
            ),
            Target(figure=f"first save of {what}, data too", peer=_PEER, limit=0.2),
            Target(figure=f"next save of {what}, data too", peer=f"{_PEER}, cached", limit=0.2),
            Target(figure=f"stall of that save of {what}", peer=f"{_PEER}, cached"),
            Target(figure=f"manifest of {what}", peer=".metadata", limit=0.2, unit="MiB"),
            Target(figure=f"manifest and index of {what}", peer=".metadata", limit=0.2, unit="MiB"),
            Target(figure=f"restore of {what} until data is read", peer="DCP's", limit=0.2),
        ]
    }


def _count(setup: Setup) -> int:
    return _QUICK_COUNT if setup.quick else _COUNT


def measure(setup: Setup, wanted: AbstractSet[str]) -> list[Row]:
    """Save with ours and plan with DCP in turn, in one process."""
    # In memory for both: how long a disk takes to sync is nothing of either.
    with tempfile.TemporaryDirectory(prefix="everstep-small-", dir=_MEMORY) as folder:
        ours, theirs = _answers(setup, folder)
    mine = {name: [answer[name] for answer in ours[1:]] for name in ours[0]}
    its = {name: [answer[name] for answer in theirs[1:]] for name in theirs[0]}

    def sums(of: dict[str, list[float]], *names: str) -> list[float]:
        return [sum(row) for row in zip(*(of[name] for name in names), strict=True)]

    names = ("plan_s", "stage_s", "upload_s", "commit_s")
    phases = {name: round(statistics.median(mine[name]), 3) for name in names}
    written = sums(mine, "upload_s", "commit_s")
    values = [
        (sums(mine, "plan_s", "upload_s", "commit_s"), its["first_s"]),
        (mine["plan_s"], its["plan_s"]),
        (written, sums(its, "check_s", "finish_s")),
        (mine["commit_s"], its["finish_s"]),
        (mine["first_s"], its["first_s"]),
        (mine["next_s"], its["next_s"]),
        (mine["stage_s"], its["next_s"]),
        (mine["manifest_mib"], its["metadata_mib"]),
        (sums(mine, "manifest_mib", "index_mib"), its["metadata_mib"]),
        (mine["restore_s"], its["restore_s"]),
    ]
    aims = targets(setup)["small"]
    return [
        rows.compared(aim, our, peer, phases=phases)
        for aim, (our, peer) in zip(aims, values, strict=True)
    ]


def _answers(setup: Setup, folder: str) -> tuple[list[Answer], list[Answer]]:
    argv = ["-m", "tests.bench.checkpoint.many", str(_count(setup)), folder]
    child = Child("the process with small tensors", argv, setup.folder / "small.log")
    ours, theirs = [], []
    try:
        for _ in range(1 + setup.repeats):
            ours.append(child.ask("ours"))
            theirs.append(child.ask("dcp"))
            setup.say(f"  ours {ours[-1]['first_s']:.2f} s, DCP {theirs[-1]['first_s']:.2f} s")
    finally:
        child.close()
    return ours, theirs
