"""A real Slurm for tests of what runs on it; where it cannot be had, the skip says so loudly."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.devcluster import features, packages
from deploy.devcluster.client import Devcluster
from deploy.devcluster.errors import PreconditionError
from orchestrator.launch.slurm_text import SQUEUE_FORMAT, JobView, squeue_jobs

PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]
PRIVATE = (Path("/tmp"), Path("/dev/shm"))  # each node has its own


def _unusable() -> str | None:
    if os.geteuid() != 0:
        return "not root"
    missing = packages.missing(accounting=False)
    if missing:
        return f"packages are missing: apt-get install {' '.join(missing)}"
    try:
        features.lacking(features.probe())
    except PreconditionError as error:
        return str(error)
    return None


WHY_NOT = _unusable()
MARKS = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"NO REAL SLURM IS TESTED: {WHY_NOT}"),
]


def shares(*folders: Path) -> list[str]:
    """Return the options by which nodes see these folders, this code and its interpreter."""
    found: list[Path] = []
    for folder in (ROOT, Path(sys.prefix), Path(sys.base_prefix), *folders):
        place = folder.resolve()
        is_private = any(place.is_relative_to(private) for private in PRIVATE)
        if is_private and not any(place.is_relative_to(known) for known in found):
            found.append(place)
    return [word for place in found for word in ("--share", str(place))]


@contextlib.contextmanager
def cluster_of_three(letter: str, shared: Path, *more: str) -> Iterator[Devcluster]:
    """Three nodes that see a folder of this machine; the letter tells apart tests at once."""
    options = ["--nodes", "3", "--gpus", "2", "--set", "SlurmdTimeout=4", "--set", "KillWait=3"]
    with Devcluster(f"{letter}{os.getpid()}", *options, *more, *shares(shared)) as cluster:
        yield cluster


def eventually(what: str, ready: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def jobs_of(cluster: Devcluster, name: str) -> tuple[JobView, ...]:
    """All jobs of a name that the cluster remembers, whatever became of them."""
    words = ("--noheader", "--states=all", f"--format={SQUEUE_FORMAT}", f"--name={name}")
    return squeue_jobs(cluster.slurm("squeue", *words).encode())


def make_whole(cluster: Devcluster) -> None:
    """End all jobs, and have all nodes back, with nothing in their memory."""
    cluster.slurm("scancel", "--full", "--user=root")
    for name, node in cluster.nodes().items():
        if not node["power"]:
            cluster.do("power-on", name)
    eventually(
        "all nodes are idle",
        lambda: all(node["slurm"] == "idle" for node in cluster.nodes().values()),
    )


def memory_of_nodes(cluster: Devcluster) -> list[str]:
    """What lies in the nodes' /dev/shm."""
    powered = [name for name, node in cluster.nodes().items() if node["power"]]
    return [
        f"{name}: {entry}"
        for name in powered
        for entry in cluster.on(name, "ls", "/dev/shm").split()
    ]
