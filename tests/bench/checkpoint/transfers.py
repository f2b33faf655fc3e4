"""To S3 and back, beside boto3 alone with the same server."""

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from checkpointing import keys
from checkpointing.stage.arena import MappedArena
from checkpointing.store.multipart import part_nbytes
from checkpointing.store.s3_client import THREADS
from deploy.demo.s3_server import S3Server
from tests.bench.checkpoint import rows
from tests.bench.checkpoint.children import Child, Failed, World, cpu_s
from tests.bench.checkpoint.node import (
    MIB,
    RUN,
    WORLD,
    Node,
    Setup,
    Uploader,
    node,
    s3_server,
    uploader,
)
from tests.bench.checkpoint.rows import Row, Target

FIGURES = ("upload", "restore")
_ALL_WAYS_UP_TO = 1024  # MiB: above, the ways without a target would fill a disk


def targets(setup: Setup) -> dict[str, list[Target]]:
    """Return what is measured here, by figure."""
    up, back = f"upload, {setup.what}", f"restore from S3, {setup.what}, CRCs checked"
    part = part_nbytes(setup.shard_nbytes) // MIB
    multipart = f"boto3 upload_file, {part} MiB parts, {THREADS} threads per rank"
    lean = "the same, bodies neither hashed nor summed"
    ranged = "raw ranged GETs, 8 threads, 32 MiB"
    speed = {"unit": "MiB/s", "at_most": False}
    cpu = {"unit": "CPU s/GiB"}
    return {
        "upload": [
            Target(figure=up, peer=multipart, limit=0.9, **speed),
            Target(figure=f"{up}, client CPU", peer=multipart, limit=1.0, **cpu),
            Target(figure=up, peer=lean, **speed),
            Target(figure=f"{up}, client CPU", peer=lean, **cpu),
            Target(figure=up, peer="boto3 put_object", limit=1.0, **speed),
        ],
        "restore": [
            Target(figure=back, peer=ranged, limit=0.8, **speed),
            Target(figure=f"{back}, CPU of the ranks", peer=ranged, **cpu),
            Target(figure=back, peer="one boto3 get_object per rank", limit=1.0, **speed),
        ],
    }


def measure(setup: Setup, wanted: AbstractSet[str]) -> list[Row]:
    """Send and fetch in turn; the order rotates."""
    needed = setup.mib * MIB * (4 if setup.mib <= _ALL_WAYS_UP_TO else 2) * (2 + setup.repeats)
    free = shutil.disk_usage(setup.folder).free
    if free < needed:
        raise Failed(f"{setup.folder} has {free >> 30} GiB free, the server needs {needed >> 30}")
    with _running(setup) as bench:
        events = bench.save()[2]
        found = _uploads(bench) if "upload" in wanted else []
        if "restore" in wanted:
            bench.place.commit(events)
            found += _restores(bench, events)
        return found


@dataclass(frozen=True, slots=True)
class _Bench:
    setup: Setup
    place: Node
    world: World
    sending: Uploader
    server: S3Server
    boto3: Child

    def save(self) -> tuple[float, float, list[dict[str, Any]]]:
        """Save; return seconds and CPU seconds of its upload, and the events."""
        used = cpu_s(self.sending.process.pid)
        self.world.ask("save")
        events = self.sending.uploaded(self.place.newest_step())
        took = max(e["at"] for e in events) - min(e["at"] - e["upload_s"] for e in events)
        return took, cpu_s(self.sending.process.pid) - used, events

    def put(self, how: str, files: list[str]) -> tuple[float, float]:
        """Send the same with boto3."""
        named = {f"plain/{how}/{secrets.token_hex(4)}": path for path in files}
        part = part_nbytes(self.setup.shard_nbytes)
        answer = self.boto3.ask("put", how=how, files=named, part=part, threads=THREADS)
        return answer["s"], answer["cpu_s"]


@contextlib.contextmanager
def _running(setup: Setup) -> Iterator[_Bench]:
    with s3_server(setup) as server, node(setup, server) as place, place.ranks() as world:
        world.ask("prepare", overlap=False)
        argv = ["-m", "tests.bench.checkpoint.sender", server.url, server.bucket]
        child = Child("boto3", argv, setup.folder / "sender.log")
        try:
            with uploader(place) as sending:
                yield _Bench(setup, place, world, sending, server, child)
        finally:
            child.close()


def _uploads(bench: _Bench) -> list[Row]:
    setup, files = bench.setup, _files(bench)
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "ours": lambda: bench.save()[:2],
        "multipart": lambda: bench.put("multipart", files),
    }
    if setup.mib <= _ALL_WAYS_UP_TO:
        ways["lean"] = lambda: bench.put("lean", files)
        ways["put"] = lambda: bench.put("put", files)
    speeds, cpus = _in_turn(setup, ways)
    aims = targets(setup)["upload"]
    why = "" if "put" in ways else f"only up to {_ALL_WAYS_UP_TO} MiB"
    return [
        rows.compared(aims[0], speeds["ours"], speeds["multipart"]),
        rows.compared(aims[1], cpus["ours"], cpus["multipart"]),
        rows.compared(aims[2], speeds["ours"], speeds.get("lean", ()), why),
        rows.compared(aims[3], cpus["ours"], cpus.get("lean", ()), why),
        rows.compared(aims[4], speeds["ours"], speeds.get("put", ()), why),
    ]


def _files(bench: _Bench) -> list[str]:
    """Write what the ranks upload to files, which stay in the page cache."""
    found = []
    for rank in range(WORLD):
        arena = MappedArena(bench.place.arena(rank))
        path = bench.setup.folder / f"body-{rank}"
        with path.open("wb") as file:
            file.write(arena.data(arena.staged()[0].index)[: bench.setup.shard_nbytes])
        arena.close()
        found.append(str(path))
    return found


def _restores(bench: _Bench, events: list[dict[str, Any]]) -> list[Row]:
    step, world = events[0]["step"], bench.world
    prefix = bench.place.config.url.removeprefix(f"{bench.server.store_url}/")
    objects = [f"{prefix}/{keys.data_key(RUN, step, 1, rank)}" for rank in range(WORLD)]

    def slowest(do: str, **arguments: Any) -> tuple[float, float]:
        answers = world.ask(do, **arguments)
        return max(took for took, _ in answers), sum(used for _, used in answers)

    def get(ranged: bool) -> tuple[float, float]:
        return slowest("raw_get", bucket=bench.server.bucket, keys=objects, ranged=ranged)

    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "ours": lambda: slowest("restore_store", step=step),
        "ranged": lambda: get(True),
        "one": lambda: get(False),
    }
    speeds, cpus = _in_turn(bench.setup, ways)
    aims = targets(bench.setup)["restore"]
    return [
        rows.compared(aims[0], speeds["ours"], speeds["ranged"]),
        rows.compared(aims[1], cpus["ours"], cpus["ranged"]),
        rows.compared(aims[2], speeds["ours"], speeds["one"]),
    ]


def _in_turn(
    setup: Setup, ways: dict[str, Callable[[], tuple[float, float]]]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Do all, again and again; none is always first. Returns MiB/s and CPU s/GiB."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for turn in range(1 + setup.repeats):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            took, used = ways[name]()
            if turn:
                speeds[name].append(setup.mib / took)
                cpus[name].append(used / setup.mib * 1024)
            setup.say(f"  {name}: {setup.mib / took:.0f} MiB/s, {used:.2f} CPU s")
    return speeds, cpus
