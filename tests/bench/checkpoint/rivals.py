"""The stall of a save beside `dcp.async_save` to S3, in its best way."""

import contextlib
import secrets
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from checkpointing.stage.memory import room_for
from deploy.demo.s3_server import S3Server
from tests.bench.checkpoint import rows
from tests.bench.checkpoint.children import Failed
from tests.bench.checkpoint.node import MIB, Setup, node, s3_server, uploader
from tests.bench.checkpoint.rows import Row, Target

FIGURES = ("dcp",)
WRITERS = {"s3fs": "FsspecWriter/s3fs", "s3torchconnector": "s3torchconnector"}
OURS = "ours"
_INSTALL_S = 300.0
_SCREENED_MIB = 256
_TIMES_STATE = 12  # of memory: three states, what each stages, what is being sent
_COMPLETE = "complete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How `dcp.async_save` stages and writes; see `dcp_rank.Rank.prepare`."""

    process: bool = False
    kept: bool = False
    shared: bool = False
    thread: bool = False


WAYS = {
    "thread, the writer's stager": Way(),
    "thread, DefaultStager": Way(kept=True),
    "thread, DefaultStager in a thread": Way(kept=True, thread=True),
    "process, DefaultStager shared": Way(process=True, kept=True, shared=True),
    "process, DefaultStager shared in a thread": Way(
        process=True, kept=True, shared=True, thread=True
    ),
}


@dataclass(slots=True)
class _Peer:
    """A writer: its best ways for the first save and for all others, and why it has no figure."""

    tried: dict[str, str] = field(default_factory=dict)
    first_way: str = ""
    next_way: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Side:
    """Ranks that save: how long a save blocks them, and the wait for its upload."""

    save: Callable[[], float]
    settle: Callable[[], object]


Start = Callable[[S3Server], AbstractContextManager[_Side]]
Times = dict[str, list[float]]


def targets(setup: Setup) -> dict[str, list[Target]]:
    """Return what is measured here, by figure."""
    return {
        "dcp": [
            Target(
                figure=f"stall of {when}, {setup.what}",
                peer=f"dcp.async_save, {name}",
                limit=0.5,
            )
            for when in ("a save", "the first save")
            for name in WRITERS.values()
        ]
    }


def measure(setup: Setup, wanted: AbstractSet[str]) -> list[Row]:
    """Find each writer's best way with a smaller state, then save in turn."""
    python = install(setup.peers or setup.folder / "peers")
    small = replace(setup, mib=min(setup.mib, _SCREENED_MIB))
    peers = {writer: _screened(small, python, writer) for writer in WRITERS}

    def starts(way_of: Callable[[_Peer], str]) -> dict[str, Start]:
        found: dict[str, Start] = {OURS: partial(_ours, setup)}
        for writer, peer in peers.items():
            if not peer.why:
                found[writer] = partial(_theirs, setup, python, writer, WAYS[way_of(peer)])
        return found

    first = _first_saves(setup, starts(lambda peer: peer.first_way), peers)
    later = _later_saves(setup, starts(lambda peer: peer.next_way), peers)
    aims = iter(targets(setup)["dcp"])
    return [
        rows.compared(
            next(aims), times[OURS], times.get(writer, ()), peer.why, way=way, ways=peer.tried
        )
        for times, is_first in ((later, False), (first, True))
        for writer, peer in peers.items()
        for way in (peer.first_way if is_first else peer.next_way,)
    ]


def _screened(setup: Setup, python: Path, writer: str) -> _Peer:
    """Try all ways with two saves each."""
    peer, first, later = _Peer(), {}, {}
    with s3_server(setup) as server:
        for name, way in WAYS.items():
            try:
                with _theirs(setup, python, writer, way, server) as side:
                    first[name] = side.save()
                    side.settle()
                    later[name] = side.save()
            except Failed as error:
                first.pop(name, None)
                peer.tried[name] = peer.why = str(error)
            else:
                peer.tried[name] = f"{first[name]:.3f} s, then {later[name]:.3f} s"
            setup.say(f"  {writer}, {setup.what}, {name}: {peer.tried[name]}")
    if later:
        peer.why = ""
        peer.first_way = min(first, key=first.__getitem__)
        peer.next_way = min(later, key=later.__getitem__)
    return peer


def _first_saves(setup: Setup, starts: dict[str, Start], peers: dict[str, _Peer]) -> Times:
    """Begin anew for every save."""
    found: Times = {name: [] for name in starts}
    for turn in range(setup.repeats):
        with s3_server(setup) as server:
            for name in _rotated(list(found), turn):
                try:
                    with starts[name](server) as side:
                        found[name].append(side.save())
                except Failed as error:
                    _give_up(setup, name, error, peers)
                    del found[name]
        setup.say(f"  first saves: {_last(found)}")
    return found


def _later_saves(setup: Setup, starts: dict[str, Start], peers: dict[str, _Peer]) -> Times:
    """Save in turn after a warm-up, all ranks alive; one after another where memory is short."""
    is_roomy = room_for(Path("/dev/shm"))["MemAvailable"] > _TIMES_STATE * setup.mib * MIB
    found: Times = {name: [] for name in starts}
    for names in [list(starts)] if is_roomy else [[name] for name in starts]:
        with s3_server(setup) as server, contextlib.ExitStack() as stack:
            sides = {name: stack.enter_context(starts[name](server)) for name in names}
            for turn in range(1 + setup.repeats):
                for name in _rotated(list(sides), turn):
                    try:
                        took = sides[name].save()
                        sides[name].settle()
                    except Failed as error:
                        _give_up(setup, name, error, peers)
                        del sides[name], found[name]
                        continue
                    found[name] += [took] if turn else []
                setup.say(f"  saves: {_last(found)}")
    return found


def _give_up(setup: Setup, name: str, error: Failed, peers: dict[str, _Peer]) -> None:
    """A peer that fails has no figure; ours has to work."""
    if name == OURS:
        raise error
    peers[name].why = str(error)
    setup.say(f"  {name}: {error}")


def _rotated(names: list[str], turn: int) -> list[str]:
    first = turn % max(1, len(names))
    return names[first:] + names[:first]


def _last(times: Times) -> str:
    return ", ".join(f"{name} {took[-1]:.3f} s" for name, took in times.items() if took)


@contextlib.contextmanager
def _theirs(setup: Setup, python: Path, writer: str, way: Way, server: S3Server) -> Iterator[_Side]:
    with node(setup, server) as place, place.ranks("dcp_rank", python=python) as world:
        world.ask("prepare", writer=writer, **asdict(way))

        def save() -> float:
            path = f"{server.store_url}/{secrets.token_hex(4)}"
            return max(world.ask("save", path=path))

        yield _Side(save, partial(world.ask, "wait"))


@contextlib.contextmanager
def _ours(setup: Setup, server: S3Server) -> Iterator[_Side]:
    with node(setup, server) as place, place.ranks() as world, uploader(place) as sending:
        world.ask("prepare", overlap=False)
        yield _Side(lambda: max(world.ask("save")), lambda: sending.uploaded(place.newest_step()))


def install(folder: Path) -> Path:
    """Install the peers beside the project's packages, not among them; return the interpreter.

    Raises:
        Failed: They cannot be had here; says why.
    """
    python = folder / "bin" / "python"
    if (folder / _COMPLETE).exists():
        return python
    venv.create(folder, with_pip=True, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    paths = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in paths]
    (site / "project.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    argv = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*argv, *WRITERS], capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"pip install took longer than {_INSTALL_S:.0f} s") from error
    if done.returncode:
        why = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise Failed(f"pip install {' '.join(WRITERS)}: {why[-1]}")
    (folder / _COMPLETE).touch()
    return python
