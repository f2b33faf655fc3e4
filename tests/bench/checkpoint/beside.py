"""What an upload costs the steps beside it."""

import os
import statistics
import time
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from tests.bench.checkpoint import rows
from tests.bench.checkpoint.children import Failed, World, cpu_s
from tests.bench.checkpoint.node import Node, Setup, Uploader, node, s3_server, uploader
from tests.bench.checkpoint.rows import Row, Target

FIGURES = ("beside-pinned", "beside-free", "beside-slow")
_TOKENS = 16
_BUDGET = 20e6
_SLOW_MIB = 256  # of state at most with it: an upload of 1 GiB takes a minute
_STEPS = 8
_MOST = 100_000
_PEER = "the same loop without checkpoints"


def targets(setup: Setup) -> dict[str, list[Target]]:
    """Return what is measured here, by figure."""
    figure = f"step while uploading, {setup.what}"
    free, slow = "processes not pinned", f"not pinned, {_BUDGET / 1e6:.0f} MB/s budget"
    pinned = "ranks on one core, uploader and server on another"
    slow_figure = f"step while uploading, {_smaller(setup).what}, {slow}"
    return {
        "beside-pinned": [Target(figure=f"{figure}, {pinned}", peer=_PEER, limit=1.05)],
        "beside-free": [Target(figure=f"{figure}, {free}", peer=_PEER)],
        "beside-slow": [Target(figure=slow_figure, peer=_PEER)],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    ranks: int | None = None
    others: int | None = None
    budget: float | None = None
    rounds: int


def measure(setup: Setup, wanted: AbstractSet[str]) -> list[Row]:
    """Train with and without an upload in turn."""
    aims = {name: found[0] for name, found in targets(setup).items()}
    cores = sorted(os.sched_getaffinity(0))
    ways = {
        "beside-pinned": _Way(ranks=cores[0], others=cores[-1], rounds=1 + setup.repeats),
        "beside-free": _Way(rounds=1 + min(3, setup.repeats)),
        "beside-slow": _Way(rounds=1, budget=_BUDGET),
    }
    found = []
    for name in FIGURES:
        if name not in wanted:
            continue
        if name == "beside-pinned" and len(cores) == 1:
            found.append(rows.missing(aims[name], "there is only one core"))
        elif name != "beside-pinned" and setup.quick:
            found.append(rows.missing(aims[name], "left out by --quick"))
        else:
            place = _smaller(setup) if name == "beside-slow" else setup
            found.append(_measured(place, aims[name], ways[name]))
    return found


def _smaller(setup: Setup) -> Setup:
    return replace(setup, mib=min(setup.mib, _SLOW_MIB))


def _measured(setup: Setup, aim: Target, way: _Way) -> Row:
    setup.say(f"  {aim.figure}")
    with (
        s3_server(setup, core=way.others) as server,
        node(setup, server) as place,
        place.ranks(tokens=_TOKENS, core=way.ranks) as world,
        uploader(place, max_bytes_per_s=way.budget, core=way.others) as sending,
    ):
        world.ask("prepare", overlap=False)
        pids = {"ranks": world.pids, "uploader": [sending.process.pid], "server": [server.pid]}
        beside, alone, shares = [], [], []
        for _ in range(way.rounds):
            alone.append(statistics.fmean(_steps(place, world, None, {})[0]))
            steps, share = _steps(place, world, sending, pids)
            beside.append(statistics.fmean(steps))
            shares.append(share)
            setup.say(f"  {beside[-1]:.3f} s beside {len(steps)} steps, {alone[-1]:.3f} s alone")
    first = min(1, way.rounds - 1)
    share = {name: round(statistics.median(s[name] for s in shares), 2) for name in pids}
    return rows.compared(aim, beside[first:], alone[first:], cores_used=share)


def _steps(
    place: Node, world: World, sending: Uploader | None, pids: dict[str, list[int]]
) -> tuple[list[float], dict[str, float]]:
    """Return how long each step took, those beside an upload only if there is one."""
    flag = place.folder / "enough"
    flag.unlink(missing_ok=True)
    begun, used = time.monotonic(), _used(pids)
    if sending is None:
        answers = world.ask("train", save=False, flag=str(flag), at_least=0, at_most=_STEPS)
        return [end - start for start, end in answers[0]["times"]], {}
    step = world.ask("done")[0] + 1
    world.send("train", save=True, flag=str(flag), at_least=1, at_most=_MOST)
    events = sending.uploaded(step, timeout_s=600.0)
    took = time.monotonic() - begun
    shares = {name: (cpu - used[name]) / took for name, cpu in _used(pids).items()}
    flag.touch()
    answer: dict[str, Any] = world.answers()[0]
    until = max(event["at"] for event in events)
    inside = [e - s for s, e in answer["times"] if s >= answer["saved_at"] and e <= until]
    if not inside:
        raise Failed("the upload was over before a step was")
    return inside, shares


def _used(pids: dict[str, list[int]]) -> dict[str, float]:
    return {name: sum(map(cpu_s, found)) for name, found in pids.items()}
