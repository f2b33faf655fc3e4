"""The stall of a save beside `dcp.async_save` to S3, in its best way."""

import secrets
import statistics
import subprocess
import sys
import venv
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deploy.demo.s3_server import S3Server
from tests.bench.checkpoint import rows
from tests.bench.checkpoint.children import Failed
from tests.bench.checkpoint.node import Setup, node, s3_server, uploader
from tests.bench.checkpoint.rows import Row, Target

FIGURES = ("dcp",)
WRITERS = {"s3fs": "FsspecWriter/s3fs", "s3torchconnector": "s3torchconnector"}
_INSTALL_S = 300.0
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
class _Found:
    """What was seen of one writer: its best way for the first save, and for all others."""

    why: str = ""
    tried: dict[str, str] = field(default_factory=dict)
    first_way: str = ""
    next_way: str = ""
    first: list[float] = field(default_factory=list)
    next: list[float] = field(default_factory=list)


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
    """Find each writer's best way, then save in turn."""
    python = install(setup.peers or setup.folder / "peers")
    found = {writer: _screened(setup, python, writer) for writer in WRITERS}
    ours_first: list[float] = []
    for _ in range(setup.repeats):
        ours_first += _ours(setup, 1)
        for writer, seen in found.items():
            _attempt(setup, python, writer, seen, 1)
        firsts = [ours_first[-1], *(seen.first[-1] for seen in found.values() if seen.first)]
        setup.say(f"  first saves: {', '.join(f'{first:.3f} s' for first in firsts)}")
    ours_next = _ours(setup, 2 + setup.repeats)[2:]
    for writer, seen in found.items():
        _attempt(setup, python, writer, seen, 2 + setup.repeats)
    aims = iter(targets(setup)["dcp"])
    return [
        *(
            rows.compared(next(aims), ours_next, s.next, s.why, way=s.next_way, ways=s.tried)
            for s in found.values()
        ),
        *(
            rows.compared(next(aims), ours_first, s.first, s.why, way=s.first_way)
            for s in found.values()
        ),
    ]


def _screened(setup: Setup, python: Path, writer: str) -> _Found:
    """Try all ways with two saves each."""
    found, first, later = _Found(), {}, {}
    with s3_server(setup) as server:
        for name, way in WAYS.items():
            try:
                saves = _saves_of(setup, server, python, writer, way, 2)
            except Failed as error:
                found.tried[name] = found.why = str(error)
            else:
                first[name], later[name] = saves
                found.tried[name] = f"{saves[0]:.3f} s, then {saves[1]:.3f} s"
            setup.say(f"  {writer}, {name}: {found.tried[name]}")
    if later:
        found.why = ""
        found.first_way = min(first, key=first.__getitem__)
        found.next_way = min(later, key=later.__getitem__)
    return found


def _attempt(setup: Setup, python: Path, writer: str, seen: _Found, count: int) -> None:
    """Save the first time, or many times; a writer that fails now has no figure."""
    if seen.why:
        return
    try:
        if count == 1:
            seen.first += _theirs(setup, python, writer, WAYS[seen.first_way], 1)
        else:
            seen.next = _theirs(setup, python, writer, WAYS[seen.next_way], count)[2:]
            setup.say(f"  {writer}: {statistics.median(seen.next):.3f} s")
    except Failed as error:
        seen.why = str(error)
        setup.say(f"  {writer}: {error}")


def _theirs(setup: Setup, python: Path, writer: str, way: Way, count: int) -> list[float]:
    with s3_server(setup) as server:
        return _saves_of(setup, server, python, writer, way, count)


def _saves_of(
    setup: Setup, server: S3Server, python: Path, writer: str, way: Way, count: int
) -> list[float]:
    """Start, save `count` times, each once the upload before is over; how long each blocked."""
    with (
        node(setup, server) as place,
        place.ranks("dcp_rank", python=python) as world,
    ):
        world.ask("prepare", writer=writer, **asdict(way))
        saves = []
        for number in range(count):
            if number:
                world.ask("wait")
            path = f"{server.store_url}/{secrets.token_hex(4)}"
            saves.append(max(world.ask("save", path=path)))
        return saves


def _ours(setup: Setup, count: int) -> list[float]:
    with (
        s3_server(setup) as server,
        node(setup, server) as place,
        place.ranks() as world,
        uploader(place) as sending,
    ):
        world.ask("prepare", overlap=False)
        saves = []
        for number in range(count):
            if number:
                sending.uploaded(place.newest_step())
            saves.append(max(world.ask("save")))
        return saves


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
