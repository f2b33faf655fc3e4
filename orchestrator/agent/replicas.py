"""The node's replicas process: copies what its ranks stage elsewhere, and brings copies back."""

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.agent.kept import KeptProcess
from orchestrator.config import RunConfig
from orchestrator.core.events import DISK, PEER, Replica, Replicated
from orchestrator.wire import FetchedRank, FetchNode

log = logging.getLogger(__name__)

READY_S = 10.0
MOST_AGENTS = 64
REACH = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the replicas of a node are kept, and how much copying them may take.

    Attributes:
        node_dir: The node's memory, with the arenas.
        token_path: File with what the nodes of the run know and nobody else.
        disk: Folder on a disk of the node, None for no replicas there.
    """

    node: str
    node_dir: Path
    run: str
    host: str
    token_path: Path
    disk: Path | None
    bytes_per_s: float


def place_of(config: RunConfig, node: str, node_dir: Path, host: str) -> Place:
    """Return where a run wants the replicas of a node."""
    return Place(
        node=node,
        node_dir=node_dir,
        run=config.run.name,
        host=host,
        token_path=config.run_dir / "token",
        disk=config.checkpoint.disk_dir,
        bytes_per_s=config.checkpoint.max_copy_bytes_per_s,
    )


class Replicas(KeptProcess):
    """Owns the process; what it keeps becomes facts.

    Attributes:
        address: Where it takes and gives copies, "" before it said so.
        held: The copies that it keeps.
        failed: How often copying to a tier failed.
        copied_at: Unix seconds of the last copy to a tier.
    """

    def __init__(self, place: Place, fact: Callable[[Replicated], None]) -> None:
        self._place = place
        self._fact = fact
        self._token = place.token_path.read_text(encoding="utf-8").strip()
        self._lock = -1
        self._problems: dict[str, str] = {}
        super().__init__("replicas", self._words())
        self.address = ""
        self.held: tuple[Replica, ...] = ()
        self.failed: dict[str, int] = {}
        self.copied_at: dict[str, float] = {}
        self._buddy = ""
        self._numbers = itertools.count(1)
        self._fetching: dict[int, tuple[str, asyncio.Future[str]]] = {}
        self._ready = asyncio.Event()

    def _words(self) -> list[str]:
        place = self._place
        words = [
            sys.executable,
            "-m",
            "checkpointing.replicas",
            *("--dir", str(place.node_dir)),
            *("--run", place.run),
            *("--node", place.node),
            *("--host", place.host),
            *("--max-bytes-per-s", f"{place.bytes_per_s:.0f}"),
            "--until-eof",
        ]
        if place.disk is not None:
            try:
                words += ["--disk", str(place.disk / self._shelf(place.disk))]
            except OSError as error:  # the ranks go on, as they do without the store
                log.error("nothing is copied to a disk here: %s", error)
                self._problems[DISK] = str(error)[:300]
        return words

    def _shelf(self, disk: Path) -> str:
        """Take a folder on the disk that no other agent of this machine has.

        It is the first free one, so that agents on the same machines find what those before them
        left. Another run of this name, in a directory of its own, has folders of its own.
        """
        run = hashlib.sha256(f"replicas:{self._token}".encode()).hexdigest()[:12]
        disk.mkdir(parents=True, exist_ok=True)
        for number in range(MOST_AGENTS):
            path = disk / f"{run}-{number}.lock"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                self._lock = descriptor  # until this process ends
                return path.stem
        raise OSError(f"{MOST_AGENTS} agents of this run have folders in {disk} already")

    async def run(self) -> None:
        """As of any kept process; the folder on the disk is free afterwards."""
        try:
            await super().run()
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    async def ready(self, timeout_s: float = READY_S) -> None:
        """Wait until it told what it keeps; the node is of use without it too."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), timeout_s)

    def started(self) -> None:
        """Give a new process the token, the buddy, and what the one before it did not finish."""
        self.say(self._token)
        if self._buddy:
            self._say_buddy()
        for line, _ in self._fetching.values():
            self.say(line)

    def ended(self) -> None:
        """Nothing can be had from here until the next one says where."""
        self.address = ""
        self._tell()

    def point_at(self, address: str) -> None:
        """Have the node's snapshots copied there from now on."""
        self._buddy = address
        self._say_buddy()

    def _say_buddy(self) -> None:
        self.say(json.dumps({"do": "buddy", "address": self._buddy}))

    async def fetch(self, wanted: FetchNode) -> dict[int, str]:
        """Bring copies into the ranks' arenas; return why, for each rank that could get none."""
        work = [self._fetch_one(wanted, rank) for rank in wanted.ranks]
        errors = await asyncio.gather(*work)
        return {rank.rank: why for rank, why in zip(wanted.ranks, errors, strict=True) if why}

    async def _fetch_one(self, wanted: FetchNode, rank: FetchedRank) -> str:
        if not rank.sources:
            return "no node that had a copy is there any more"
        number = next(self._numbers)
        line = json.dumps(
            {
                "do": "fetch",
                "id": number,
                "rank": rank.rank,
                "world": wanted.world,
                "step": wanted.step,
                "attempt": wanted.saved_by,
                "from": rank.sources,
                "arena": str(self._place.node_dir / f"arena-{rank.rank}"),
            }
        )
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._fetching[number] = line, answer
        self.say(line)
        try:
            return await asyncio.wait_for(answer, wanted.timeout_s)
        except TimeoutError:
            self._say_too_late(number)
            return f"no copy within {wanted.timeout_s:g} s"
        finally:
            del self._fetching[number]

    def give_up(self) -> None:
        """Nobody needs what is being brought any more."""
        for number, (_, answer) in self._fetching.items():
            if not answer.done():
                self._say_too_late(number)
                answer.set_result("given up")

    def _say_too_late(self, number: int) -> None:
        """Ranks may be started next: no file is to take their arena's place any more."""
        self.say(json.dumps({"do": "give_up", "id": number}))

    def heard(self, value: Any) -> None:
        """Take in what it says."""
        match value:
            case {"event": "listening", "address": str(address)}:
                self.address = address[:300]
                self._tell()
            case {"event": "held", "replicas": list(found)}:
                self.held = tuple(sorted(map(replica_of, found), key=_order))
                self._ready.set()
                self._tell()
            case {"event": "fetched", "id": int(number), "ok": bool(ok)}:
                _, answer = self._fetching.get(number, ("", None))
                if answer is not None and not answer.done():
                    answer.set_result("" if ok else str(value.get("error"))[:300] or "no reason")
            case {"event": "copied", "tier": "peer" | "disk" as tier}:
                self.copied_at[tier] = time.time()  # what is kept is told by who keeps it
                if self._problems.pop(tier, ""):
                    self._tell()
            case {"event": "copy_failed" | "refused" as event}:
                why = str(value.get("error"))[:300]
                log.warning("replicas: %s", why)
                if event == "copy_failed" and (tier := value.get("tier")) in (PEER, DISK):
                    self._has_failed(tier, why)
            case _:
                raise KeyError(str(value)[:100])

    def _has_failed(self, tier: str, why: str) -> None:
        """Count a failure, and tell of the first since a copy came through."""
        self.failed[tier] = self.failed.get(tier, 0) + 1
        if tier not in self._problems:
            self._problems[tier] = why
            self._tell()

    def _tell(self) -> None:
        where = {PEER: "to its buddy", DISK: "to its disk"}
        words = [f"{where[tier]}: {why}" for tier, why in sorted(self._problems.items())]
        self._fact(
            Replicated(
                node=self._place.node,
                address=self.address,
                replicas=self.held,
                problem="; ".join(words),
            )
        )


def replica_of(value: dict[str, object]) -> Replica:
    """Read one entry of what is kept; raises KeyError, TypeError or ValueError."""

    def number(name: str) -> int:
        item = value[name]
        if type(item) is not int:
            raise TypeError(f"{name} is no integer")
        if not 0 <= item < REACH:
            raise ValueError(f"{name} is out of range")
        return item

    tier = str(value["tier"])
    if tier not in (PEER, DISK):
        raise ValueError(f"unknown tier {tier[:20]}")
    return Replica(
        tier=tier,
        rank=number("rank"),
        step=number("step"),
        attempt=number("attempt"),
        world=number("world"),
    )


def _order(replica: Replica) -> tuple[str, int, int, int]:
    return replica.tier, replica.rank, replica.step, replica.attempt
