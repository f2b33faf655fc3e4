"""Very many small tensors: the plan and what is written about them, beside DCP's."""

import statistics
from collections.abc import Set as AbstractSet

from tests.bench.checkpoint import rows
from tests.bench.checkpoint.children import Child
from tests.bench.checkpoint.node import Setup
from tests.bench.checkpoint.rows import Row, Target

FIGURES = ("small",)
_COUNT = 100_000
_QUICK_COUNT = 10_000
_PEER = "DCP without the data"


def targets(setup: Setup) -> dict[str, list[Target]]:
    """Return what is measured here, by figure."""
    what = f"{_count(setup):,} tensors of 64 bytes"
    return {
        "small": [
            Target(figure=f"first save of {what}", peer=_PEER, limit=0.2),
            Target(figure=f"next save of {what}", peer=f"{_PEER}, plan cached", limit=0.2),
            Target(figure=f"first plan of {what}", peer="DCP's"),
            Target(figure=f"index and commit of {what}", peer="DCP's .metadata"),
            Target(figure=f"stall of that save of {what}", peer=f"{_PEER}, plan cached"),
            Target(figure=f"manifest of {what}", peer=".metadata", limit=0.2, unit="MiB"),
            Target(figure=f"manifest and index of {what}", peer=".metadata", limit=0.2, unit="MiB"),
        ]
    }


def _count(setup: Setup) -> int:
    return _QUICK_COUNT if setup.quick else _COUNT


def measure(setup: Setup, wanted: AbstractSet[str]) -> list[Row]:
    """Save with ours and plan with DCP in turn, in one process."""
    folder = setup.folder / "small"
    folder.mkdir()
    argv = ["-m", "tests.bench.checkpoint.many", str(_count(setup)), str(folder)]
    child = Child("the process with small tensors", argv, setup.folder / "small.log")
    ours, theirs = [], []
    try:
        for _ in range(1 + setup.repeats):
            ours.append(child.ask("ours"))
            theirs.append(child.ask("dcp"))
            setup.say(f"  ours {ours[-1]['first_s']:.2f} s, DCP {theirs[-1]['first_s']:.2f} s")
    finally:
        child.close()
    mine = {name: [answer[name] for answer in ours[1:]] for name in ours[0]}
    its = {name: [answer[name] for answer in theirs[1:]] for name in theirs[0]}
    both = [a + b for a, b in zip(mine["manifest_mib"], mine["index_mib"], strict=True)]
    written = [a + b for a, b in zip(mine["upload_s"], mine["commit_s"], strict=True)]
    names = ("plan_s", "stage_s", "upload_s", "commit_s")
    phases = {name: round(statistics.median(mine[name]), 3) for name in names}
    aims = targets(setup)["small"]
    return [
        rows.compared(aims[0], mine["first_s"], its["first_s"], phases=phases),
        rows.compared(aims[1], mine["next_s"], its["next_s"], phases=phases),
        rows.compared(aims[2], mine["plan_s"], its["plan_s"]),
        rows.compared(aims[3], written, its["finish_s"]),
        rows.compared(aims[4], mine["stage_s"], its["next_s"]),
        rows.compared(aims[5], mine["manifest_mib"], its["metadata_mib"]),
        rows.compared(aims[6], both, its["metadata_mib"]),
    ]
