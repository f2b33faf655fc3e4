"""Time from a fault to the first new step: ``python -m tests.bench.mttr [--quick] [--json]``.

Three training nodes and one spare of a devcluster (a real Slurm on this machine; needs root). Ours
and each peer run the same script in turn on the same nodes, with the files in the page cache. Ours
loses a node in silence, as with a power loss, and restores a checkpoint; what the peers are spared
is in `theirs`. `--quick` takes one recovery of ours for two of the faults, without the peers; the
whole takes about 25 minutes, most of them the peers'.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.demo.run import DemoError
from deploy.devcluster.errors import DevclusterError
from tests.bench.mttr import machine as m
from tests.bench.mttr import ours, rows, theirs
from tests.integration.devclusters import WHY_NOT

OURS = 5
THEIRS = 2
QUICK = "left out by --quick"
QUICK_FAULTS = ("rank", "node")

FAULTS = {
    "rank": "rank SIGKILL",
    "node": "node power loss",
    "host": "power loss of the batch and rendezvous host",
    "hang": "hang (SIGSTOP of one rank)",
}


@dataclass(slots=True)
class Findings:
    """What was measured of one fault, and why something was not."""

    recoveries: list[ours.Recovery] = field(default_factory=list)
    why_none: str = ""
    peers: dict[str, list[theirs.Recovery]] = field(default_factory=dict)
    why_no_peer: dict[str, str] = field(default_factory=dict)


class Bench:
    """Takes ours and theirs in turn."""

    def __init__(self, machine: m.Machine, ours_times: int, theirs_times: int) -> None:
        self._machine = machine
        self._ours = ours_times
        self._theirs = theirs_times
        self._nvrx: Path | None = None

    def take(self, fault: str) -> Findings:
        """Measure one fault: half of ours, each peer once, and so on."""
        found = Findings()
        turns = self._theirs if self._theirs and self._peers(fault) else 1
        for turn in range(turns):
            share = self._ours // turns + (turn < self._ours % turns)
            self._take_ours(fault, share, found)
            if self._theirs:
                self._take_theirs(fault, found)
        return found

    def _take_ours(self, fault: str, times: int, found: Findings) -> None:
        def measure() -> None:
            if fault in ("node", "host"):
                for _ in range(times):
                    with ours.started(self._machine) as run:
                        place = 1 if fault == "node" else 0
                        found.recoveries.append(ours.node_lost(self._machine, run, place))
                        say(f"  ours: {found.recoveries[-1].total_s:.2f} s, load {load()}")
                return
            act = ours.rank_killed if fault == "rank" else ours.rank_stopped
            with ours.started(self._machine) as run:
                for number in range(times):
                    if number:
                        ours.settle(run)
                    found.recoveries.append(act(run, number))
                    say(f"  ours: {found.recoveries[-1].total_s:.2f} s, load {load()}")

        if times:
            found.why_none = attempt("ours", measure) or found.why_none

    def _take_theirs(self, fault: str, found: Findings) -> None:
        for peer, measure in self._peers(fault).items():

            def once(
                measure: Callable[[], list[theirs.Recovery]] = measure, to: str = peer
            ) -> None:
                taken = measure()
                found.peers.setdefault(to, []).extend(taken)
                for recovery in taken:
                    say(f"  {to}: {recovery.total_s:.1f} s, load {load()}")

            if why := attempt(peer, once):
                found.why_no_peer[peer] = why

    def _peers(self, fault: str) -> dict[str, Callable[[], list[theirs.Recovery]]]:
        machine = self._machine
        match fault:
            case "rank":
                return {theirs.RESTARTS.name: lambda: theirs.rank_killed(machine, 1)}
            case "node":
                return {
                    theirs.REQUEUE.name: lambda: theirs.node_lost(machine, theirs.REQUEUE, 1),
                    theirs.ELASTIC.name: lambda: theirs.node_lost(machine, theirs.ELASTIC, 2),
                    theirs.NVRX_ELASTIC.name: self._nvrx_node_lost,
                }
            case "host":
                return {theirs.REQUEUE.name: lambda: theirs.node_lost(machine, theirs.REQUEUE, 0)}
            case _:
                return {}

    def _nvrx_node_lost(self) -> list[theirs.Recovery]:
        if self._nvrx is None:
            self._nvrx = theirs.install_nvrx(self._machine.folder / "nvrx")
        return theirs.node_lost(self._machine, theirs.NVRX_ELASTIC, 2, self._nvrx)


def attempt(who: str, measure: Callable[[], None]) -> str:
    """Measure; return why it could not be, for the row, instead of giving up all others."""
    try:
        measure()
    except (m.Failed, DemoError, DevclusterError) as error:
        say(f"  {who}: not measured: {error}")
        return str(error)
    return ""


def table(fault: str, found: Findings) -> list[rows.Row]:
    """Return the rows of one fault."""
    name = FAULTS[fault]
    parts = rows.phases(name, found.recoveries)
    if fault == "hang":
        return [*rows.hang(found.recoveries, found.why_none), *parts]
    targets = {
        "rank": [(theirs.RESTARTS, 8.0)],
        "node": [(theirs.REQUEUE, 40.0), (theirs.ELASTIC, 10.0), (theirs.NVRX_ELASTIC, 10.0)],
        "host": [(theirs.REQUEUE, 40.0)],
    }[fault]
    compared = [
        rows.compared(
            name,
            found.recoveries,
            peer.name,
            found.peers.get(peer.name, []),
            factor,
            found.why_none or found.why_no_peer.get(peer.name, QUICK),
        )
        for peer, factor in targets
    ]
    return [*compared, *parts]


def say(text: str) -> None:
    print(text, flush=True)


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def main() -> None:
    options = _options()
    if WHY_NOT is not None:
        raise SystemExit(f"mttr needs a real Slurm: {WHY_NOT}")
    found: list[dict[str, Any]] = []
    try:
        with m.running() as machine:
            bench = Bench(machine, options.repeat, 0 if options.quick else THEIRS)
            for fault in options.only or FAULTS:
                if options.quick and not options.only and fault not in QUICK_FAULTS:
                    found += table(fault, Findings(why_none=QUICK))
                    continue
                say(f"{FAULTS[fault]}; load {load()}")
                found += table(fault, bench.take(fault))
    except KeyboardInterrupt:
        sys.exit(130)
    say("")
    for row in found:
        say(rows.line(row))
    if options.json:
        say(json.dumps({"bench": "mttr", "rows": found}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.mttr", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a coarse answer within a minute")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--only", action="append", choices=FAULTS, help="this fault; repeatable")
    parser.add_argument("--repeat", type=int, help=f"recoveries of ours per fault ({OURS})")
    options = parser.parse_args()
    if options.repeat is None:
        options.repeat = 1 if options.quick else OURS
    if options.repeat < 1:
        parser.error("--repeat must be 1 or more")
    return options


if __name__ == "__main__":
    main()
