"""Processes of a whole run that note the points of their protocols, and one that dies at one.

`dying/sitecustomize.py` has every process of such a run call `prepare`. Points of an agent: each
message it sends or receives, each fact it keeps, each line it hears of a process beside its ranks.
Points of a rank: each change of its phase, and each write to the header of its arena.
"""

import json
import os
import signal
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from checkpointing.seqlock import Record
from checkpointing.slot import RankSlot, SlotReading
from orchestrator.agent.connection import Connection
from orchestrator.agent.kept import KeptProcess
from orchestrator.agent.replicas import Replicas
from orchestrator.agent.uploads import Uploads
from orchestrator.core.codec import TAG
from orchestrator.wire import FactEvent

FOLDER = "DYING_FOLDER"
DEATH = "DYING_DEATH"
HERE = Path(__file__).parent
_seen: Counter[str] = Counter()
_companions: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Death:
    """Who is killed at the n-th time that a process comes to a point; it happens once in a run.

    Attributes:
        victim: `agent`, `uploader`, `replicas` or `trainer`.
        when: `before` or `after` what the point names; `inside`: half of a record is written.
        rank: Of the trainer.
    """

    victim: str
    point: str
    n: int
    when: str
    rank: int = 0

    @property
    def label(self) -> str:
        """What to call it where it went wrong."""
        return f"{self.victim} {self.rank} {self.when} {self.point} {self.n}"


def environment(folder: Path, death: Death | None) -> dict[str, str]:
    """Return what a run's environment has to have; without a death its points are noted."""
    folder.mkdir(parents=True)
    return {
        "PYTHONPATH": f"{HERE / 'dying'}{os.pathsep}{HERE.parents[1]}",
        FOLDER: str(folder),
        DEATH: json.dumps(death and asdict(death)),
    }


def points_of(folder: Path) -> dict[str, int]:
    """Return the points of a run without a death, and how often one process came there at most."""
    most: dict[str, int] = {}
    for line in (folder / "points").read_text().splitlines():
        point, _, n = line.rpartition(" ")
        most[point] = max(most.get(point, 0), int(n))
    return most


def has_died(folder: Path) -> bool:
    """Whether the run came to the point at all."""
    return (folder / "died").exists()


def prepare() -> None:
    """Watch the protocols of this process, whatever it is going to be."""
    if os.environ.get(FOLDER):
        said = json.loads(os.environ[DEATH])
        death = None if said is None else Death(**said)
        _watch_agent(Path(os.environ[FOLDER]), death)
        _watch_rank(Path(os.environ[FOLDER]), death)


def _reach(folder: Path, death: Death | None, point: str) -> str:
    """Count a point, and note it; return when in it to die, "" for not at all."""
    _seen[point] += 1
    if death is None:
        with (folder / "points").open("a") as file:
            file.write(f"{point} {_seen[point]}\n")
        return ""
    is_it = (death.point, death.n) == (point, _seen[point])
    if is_it and death.victim == "trainer":
        is_it = os.environ["RANK"] == str(death.rank)
    return death.when if is_it else ""


def _die(folder: Path, victim: str) -> None:
    try:
        (folder / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    pid = _companions[victim] if victim in _companions else os.getpid()
    os.kill(pid, signal.SIGKILL)


def _watch_agent(folder: Path, death: Death | None) -> None:
    victim = death.victim if death is not None else ""
    send, receive, keep = (
        aiohttp.ClientWebSocketResponse.send_str,
        Connection._receive,
        Connection.fact,
    )
    listen = KeptProcess._listen

    async def sent(self: Any, data: str, *rest: Any, **more: Any) -> None:
        when = _reach(folder, death, f"send {_kind(data)}")
        if when == "before":
            _die(folder, victim)
        await send(self, data, *rest, **more)
        if when == "after":
            _die(folder, victim)

    async def received(self: Connection, socket: Any, text: str) -> None:
        when = _reach(folder, death, f"receive {_kind(text)}")
        if when == "before":
            _die(folder, victim)
        await receive(self, socket, text)
        if when == "after":
            _die(folder, victim)

    def kept(self: Connection, event: FactEvent) -> None:
        when = _reach(folder, death, f"keep {type(event).__name__}")
        if when == "before":
            _die(folder, victim)
        keep(self, event)
        if when == "after":
            _die(folder, victim)

    async def listened(self: KeptProcess, output: Any) -> None:
        assert self._process is not None
        _companions[self._name] = self._process.pid
        await listen(self, output)

    aiohttp.ClientWebSocketResponse.send_str = sent  # type: ignore[method-assign]
    Connection._receive = received  # type: ignore[method-assign]
    Connection.fact = kept  # type: ignore[method-assign]
    KeptProcess._listen = listened  # type: ignore[method-assign]
    for kind in (Uploads, Replicas):
        _watch_lines(kind, folder, death)


def _watch_lines(kind: type[KeptProcess], folder: Path, death: Death | None) -> None:
    hear = kind.heard

    def heard(self: KeptProcess, value: Any) -> None:
        when = _reach(folder, death, f"hear {self._name} {value.get('event')}")
        if when == "before":
            _die(folder, death.victim if death else "")
        hear(self, value)
        if when == "after":
            _die(folder, death.victim if death else "")

    kind.heard = heard  # type: ignore[method-assign]


def _kind(text: str) -> str:
    """Say what a message is, and what is in it if anything is."""
    value = json.loads(text)
    inner = value.get("event") or value.get("body")
    return f"{value[TAG]} {inner[TAG]}" if isinstance(inner, dict) else str(value[TAG])


def _watch_rank(folder: Path, death: Death | None) -> None:
    write, begin, publish = Record.write, Record.begin, RankSlot.publish
    beats: list[Record] = []
    phases: list[str] = []

    def published(self: RankSlot, reading: SlotReading) -> None:
        beats[:] = [self._beat]
        phases.append(reading.phase.value)
        publish(self, reading)

    def point_of(record: Record) -> str:
        if "RANK" not in os.environ:
            return ""
        if record not in beats:
            return "arena"
        changed = len(phases) < 2 or phases[-1] != phases[-2]
        return f"phase {phases[-1]}" if changed else ""

    def written(self: Record, *values: float) -> None:
        point = point_of(self)
        when = _reach(folder, death, point) if point else ""
        if when == "before":
            _die(folder, "trainer")
        if when == "inside":
            payload = self._struct.pack(*values)
            self._words[0] |= 1
            self._payload[: len(payload) // 2] = payload[: len(payload) // 2]
            _die(folder, "trainer")
        write(self, *values)
        if when == "after":
            _die(folder, "trainer")

    def begun(self: Record) -> None:
        when = _reach(folder, death, "arena begin") if "RANK" in os.environ else ""
        if when == "before":
            _die(folder, "trainer")
        begin(self)
        if when == "after":
            _die(folder, "trainer")

    RankSlot.publish = published  # type: ignore[method-assign]
    Record.write = written  # type: ignore[method-assign]
    Record.begin = begun  # type: ignore[method-assign]
