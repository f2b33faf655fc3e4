"""To another node's memory and back, beside a plain socket that nobody checks."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

from checkpointing.tiers import Tier
from tests.bench.checkpoint import rows
from tests.bench.checkpoint.node import Setup
from tests.bench.checkpoint.rows import Row, Target
from tests.integration.checkpointing.replicating import ReplicaNode

FIGURES = ("replica",)
_PEER = "a bare socket copy of the same bytes"
_SPEED = {"unit": "GB/s", "at_most": False}


def targets(setup: Setup) -> dict[str, list[Target]]:
    """Return what is measured here, by figure."""
    what = f"{setup.shard_nbytes >> 20} MiB, CRCs checked"
    return {
        "replica": [
            Target(figure=f"copy to another node's memory, {what}", peer=_PEER, **_SPEED),
            Target(figure=f"brought back as an arena, {what}", peer=_PEER, **_SPEED),
            Target(figure=f"copy to the node's disk, synced, {what}", **_SPEED),
        ]
    }


def measure(setup: Setup, wanted: AbstractSet[str]) -> list[Row]:
    """Copy, fetch and send plainly in turn."""
    copied, fetched, bare, kept = [], [], [], []
    nbytes = setup.shard_nbytes
    with _nodes() as (sender, buddy):
        sender.say(do="buddy", address=buddy.address)
        for step in range(1, 2 + setup.repeats):
            sender.stage(step, nbytes, Tier.PEER)
            copied.append(_speed(sender, "peer", step))
            bare.append(_bare(sender.arena, nbytes))
            began = time.perf_counter()
            answer = buddy.fetch(sender.name(step), buddy.address)
            fetched.append(answer["nbytes"] / (time.perf_counter() - began) / 1e9)
        for step in range(100, 101 + setup.repeats):
            sender.stage(step, nbytes, Tier.DISK)
            kept.append(_speed(sender, "disk", step))
    aims = targets(setup)["replica"]
    return [
        rows.compared(aims[0], copied[1:], bare[1:]),
        rows.compared(aims[1], fetched[1:], bare[1:]),
        rows.compared(aims[2], kept[1:], ()),
    ]


def _speed(sender: ReplicaNode, tier: str, step: int) -> float:
    """Wait for a copy; return its GB/s, from the connection until the other side has it whole."""

    def told() -> list[float]:
        events = sender.of("copied")
        return [e["gb_per_s"] for e in events if (e["tier"], e["step"]) == (tier, step)]

    speed: float = sender.until(told)[0]
    return speed


def _bare(path: Path, nbytes: int) -> float:
    """Return the GB/s of a plain socket, into a buffer that is there already."""
    buffer = memoryview(bytearray(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        argv = ["-m", "tests.bench.checkpoint.bare", str(server.getsockname()[1]), str(path)]
        process = subprocess.Popen([sys.executable, *argv, str(nbytes)])
        server.settimeout(60)
        line, _ = server.accept()
        with line:
            began = time.perf_counter()
            line.sendall(b"x")
            at = 0
            while at < nbytes and (count := line.recv_into(buffer[at:])):
                at += count
            seconds = time.perf_counter() - began
    process.wait(60)
    return at / seconds / 1e9


@contextlib.contextmanager
def _nodes() -> Iterator[tuple[ReplicaNode, ReplicaNode]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="everstep-bench-") as folder:
        nodes: list[ReplicaNode] = []
        try:
            nodes += (ReplicaNode(Path(folder) / name, world=2) for name in ("sender", "buddy"))
            yield nodes[0], nodes[1]
        finally:
            for node in nodes:
                node.kill()
