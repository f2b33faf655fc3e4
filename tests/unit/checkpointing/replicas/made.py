"""Arenas, shelves and servers to test with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing.replicas.replica import Name, Offer
from checkpointing.replicas.room import Room
from checkpointing.replicas.server import Server
from checkpointing.replicas.shelf import Shelf
from checkpointing.replicas.snapshot import FileSource, SnapshotFile
from checkpointing.replicas.wire import Secret
from checkpointing.restore import Point, restore_from_memory
from checkpointing.stage.stager import Stager
from checkpointing.store.pace import Pacer
from checkpointing.tiers import Tier

SECRET = Secret(run="r", token=b"a token of this run")


def state(step: int, nbytes: int = 40_000) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    words = rng.integers(0, 1 << 62, nbytes // 8)
    return {"w": words, "small": {"b": np.arange(step, step + 3), "none": np.zeros(0)}, "n": step}


class Rank:
    """A rank that stages."""

    def __init__(self, folder: Path, rank: int = 0, world: int = 1, attempt: int = 1) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / f"arena-{rank}"
        self.stager = Stager(self.path, attempt=attempt, rank=rank, world=world)

    def stage(self, step: int, nbytes: int = 40_000) -> None:
        own = {"own": np.full(5, step)}
        self.stager.stage(step, state(step, nbytes), own, tiers=Tier.PEER | Tier.DISK)


def shelf(folder: Path, free: int = 1 << 40) -> Shelf:
    folder.mkdir(exist_ok=True)
    return Shelf(folder, Room(folder, lambda _: {"memory": free}))


@dataclass(frozen=True)
class Served:
    """A running server, and what it keeps."""

    address: str
    shelf: Shelf
    folder: Path


@contextmanager
def served(folder: Path, free: int = 1 << 40) -> Iterator[Served]:
    held = shelf(folder / "shelf", free)
    server = Server("127.0.0.1", held, SECRET, folder / "port")
    server.start()
    try:
        yield Served(address=server.address, shelf=held, folder=folder / "shelf")
    finally:
        server.close()


def put_on(held: Shelf, rank: Rank, step: int, nbytes: int = 40_000) -> Offer:
    """Keep a newly staged snapshot."""
    rank.stage(step, nbytes)
    with SnapshotFile(rank.path) as snapshot:
        index = max(range(2), key=lambda i: step_in(snapshot, i))
        offer = snapshot.offer(index)
        assert offer.name.step == step
        with held.room_for(offer) as share:
            held.keep(offer, FileSource(snapshot, index, offer, Pacer()), share)
    held.tidy()
    return offer


def step_in(snapshot: SnapshotFile, index: int) -> int:
    staged = snapshot.headers[index].staged(index)
    return staged.step if staged else -1


def assert_restores(arena: Path, name: Name, nbytes: int = 40_000) -> None:
    """A rank reads its state from this arena, bit for bit."""
    wanted = state(name.step, nbytes)
    found = state(0, nbytes)
    own = {"own": np.zeros(5, int)}
    point = Point(step=name.step, attempt=name.attempt)
    restore_from_memory(arena, point, name.rank, name.world, found, own)
    np.testing.assert_array_equal(found["w"], wanted["w"])
    np.testing.assert_array_equal(found["small"]["b"], wanted["small"]["b"])
    assert found["n"] == name.step
    assert own["own"].tolist() == [name.step] * 5
