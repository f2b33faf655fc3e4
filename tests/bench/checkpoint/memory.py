"""Memory over many saves: does it grow, and how much is it at most?"""

import threading
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Self

from tests.bench.checkpoint import rows
from tests.bench.checkpoint.children import World
from tests.bench.checkpoint.node import MIB, WORLD, Node, Setup, Uploader, node, s3_server, uploader
from tests.bench.checkpoint.rows import Row, Target

FIGURES = ("memory",)
_SAVES = 50
_SETTLED = 10
_ROOM = 64
_MOST_MIB = 256  # of state: every save stays on the server's disk
_SAMPLE_S = 0.02


def targets(setup: Setup) -> dict[str, list[Target]]:
    """Return what is measured here, by figure."""
    saves = f"{_SAVES} saves of {_mib(setup)} MiB on {WORLD} ranks"
    mib = {"unit": "MiB"}
    return {
        "memory": [
            Target(
                figure=f"ranks and uploader, most of {saves}",
                peer=f"least, after {_SETTLED}",
                limit=1.01,
                **mib,
            ),
            Target(
                figure=f"the same without state and slots, last {_SETTLED}",
                peer=f"saves {_SETTLED + 1} to {2 * _SETTLED}",
                **mib,
            ),
            Target(
                figure="peak per rank above its training, half of the uploader with it",
                peer=f"2 slots + {_ROOM} MiB",
                limit=1.0,
                **mib,
            ),
            Target(figure="peak of the uploader, arenas not counted", **mib),
        ]
    }


def _mib(setup: Setup) -> int:
    return min(setup.mib, _MOST_MIB)


def measure(setup: Setup, wanted: AbstractSet[str]) -> list[Row]:
    """Save again and again, each save uploaded before the next."""
    with (
        s3_server(setup) as server,
        node(setup, server) as place,
        place.ranks(mib=_mib(setup)) as world,
    ):
        before = [_kib(pid, "VmRSS") / 1024 for pid in world.pids]
        for pid in world.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        world.ask("prepare", overlap=False)
        with uploader(place) as sending, _Peak(sending.process.pid) as peak:
            totals = [_save(place, world, sending) for _ in range(_SAVES)]
        slots = place.arena(0).stat().st_size / MIB
        peaks = [_kib(pid, "VmHWM") / 1024 for pid in world.pids]
    grown = max(high - low for high, low in zip(peaks, before, strict=True))
    fixed = sum(before) + WORLD * slots
    own = [total - fixed for total in totals]
    aims, later = targets(setup)["memory"], totals[_SETTLED:]
    return [
        rows.compared(aims[0], [max(later)], [min(later)]),
        rows.compared(aims[1], own[-_SETTLED:], own[_SETTLED : 2 * _SETTLED]),
        rows.compared(
            aims[2],
            [grown + peak.mib / WORLD],
            [slots + _ROOM],
            of_the_rank=round(grown, 1),
            slots=round(slots, 1),
        ),
        rows.compared(aims[3], [peak.mib], ()),
    ]


def _save(place: Node, world: World, sending: Uploader) -> float:
    """Save, and return the MiB that all take now; pages of the arenas count once, at the ranks."""
    world.ask("save")
    sending.uploaded(place.newest_step())
    ranks = sum(_kib(pid, "VmRSS") for pid in world.pids)
    return (ranks + _own_kib(sending.process.pid)) / 1024


class _Peak:
    """Watches the memory of a process that is not shared memory."""

    def __init__(self, pid: int) -> None:
        self.mib = 0.0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.mib = max(self.mib, _own_kib(self._pid) / 1024)


def _own_kib(pid: int) -> int:
    return _kib(pid, "RssAnon") + _kib(pid, "RssFile")


def _kib(pid: int, name: str) -> int:
    """Return a figure of a process; source: proc_pid_status(5)."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
