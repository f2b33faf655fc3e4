"""Bad cables: packets that are slow, late or lost, at the switch where neither end sees why."""

import json
import re
from contextlib import suppress
from typing import Any

from deploy.devcluster.errors import DevclusterError, PreconditionError, UsageError
from deploy.devcluster.network import DEVICE, inside
from deploy.devcluster.plan import Node
from deploy.devcluster.programs import run, succeeds

TABLE = "bridge devcluster"
RATE = re.compile(r"([0-9]+)(bit|kbit|mbit|gbit)", re.IGNORECASE)
UNIT_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
DELAY = re.compile(r"[0-9]+(\.[0-9]+)?(us|ms|s)")


def clear(node: Node, switch: int, init: int | None) -> None:
    """Make a node's cable a good one again.

    Args:
        node: The node.
        switch: Pid of the switch's process.
        init: Pid of the node's first process, or None when it is off.
    """
    succeeds(inside(switch, "nft", "delete", "chain", *TABLE.split(), node.name))
    for pid, device in ((switch, node.name), (init, DEVICE)):
        if pid is not None:
            succeeds(inside(pid, "tc", "qdisc", "del", "dev", device, "root"))


def slow(node: Node, switch: int, init: int, rate: str, delay: str | None) -> None:
    """Limit a node's cable in both directions.

    Args:
        node: The node.
        switch: Pid of the switch's process.
        init: Pid of the node's first process.
        rate: As tc(8) writes it: 5mbit, 1gbit.
        delay: Added to every packet, each way; needs netem.
    """
    words = qdisc(rate, delay)
    for pid, device in ((switch, node.name), (init, DEVICE)):
        argv = ["tc", "qdisc", "replace", "dev", device, "root", *words]
        try:
            run(inside(pid, *argv))
        except DevclusterError as error:
            if "unknown" not in str(error):
                raise
            raise PreconditionError(f"slow needs {words[0]}, which this kernel lacks") from error


def qdisc(rate: str, delay: str | None) -> tuple[str, ...]:
    """Return the words for tc(8): tbf for a rate alone, netem where there is a delay."""
    match = RATE.fullmatch(rate)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"--rate {rate!r}: write a rate as 5mbit or 1gbit")
    if delay is not None:
        if not DELAY.fullmatch(delay):
            raise UsageError(f"--delay {delay!r}: write a time as 20ms")
        return ("netem", "rate", rate, "delay", delay)
    bits_per_s = int(match[1]) * UNIT_BITS[match[2].lower()]
    # At least what one timer tick of a 100 Hz kernel lets through, and two large frames.
    burst_bytes = max(4000, bits_per_s // 8 // 100)
    return ("tbf", "rate", rate, "burst", str(burst_bytes), "latency", "50ms")


def drop(node: Node, switch: int, port: int | None, percent: int) -> None:
    """Drop packets of a node at the switch, unseen by both ends, in both directions.

    Args:
        node: The node.
        switch: Pid of the switch's process.
        port: Only TCP and UDP packets from or to this port, on either side; None is all packets.
        percent: Chance of each packet to be lost.
    """
    rules = drop_rules(node.name, port, percent)
    argv = inside(switch, "nft", "-f", "-")
    try:
        run(argv, stdin=rules)
    except DevclusterError as error:
        raise PreconditionError(
            f"drop needs nftables for bridges in the kernel: {error}"
        ) from error


def drop_rules(node: str, port: int | None, percent: int) -> str:
    """Return the rules for nft(8); each node has a chain of its own, so that `heal` is simple."""
    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"--port {port}: must be from 1 to 65535")
    if not 1 <= percent <= 100:
        raise UsageError(f"--percent {percent}: must be from 1 to 100")
    chance = f"numgen random mod 100 < {percent} " if percent < 100 else ""
    what = f"port {port}" if port is not None else "all"
    lines = [
        f"add table {TABLE}",
        f"add chain {TABLE} {node} {{ type filter hook forward priority 0; }}",
    ]
    for side in ("iifname", "oifname"):
        for end in ("sport", "dport") if port is not None else ("",):
            match = f"meta l4proto {{ tcp, udp }} th {end} {port} " if end else ""
            rule = f'{side} "{node}" {match}{chance}drop comment "{what} {percent}%"'
            lines.append(f"add rule {TABLE} {node} {rule}")
    return "\n".join([*lines, ""])


def dropping(switch: int) -> dict[str, str]:
    """Return what is dropped on which node, read back from the switch."""
    argv = inside(switch, "nft", "-j", "list", "table", *TABLE.split())
    found: dict[str, str] = {}
    with suppress(DevclusterError):
        for item in json.loads(run(argv))["nftables"]:
            rule = item.get("rule", {})
            if "comment" in rule and rule["comment"] not in found.get(rule["chain"], ""):
                before = f"{found[rule['chain']]}, " if rule["chain"] in found else ""
                found[rule["chain"]] = before + rule["comment"]
    return found


def slowed(switch: int) -> dict[str, str]:
    """Return which nodes' cables are limited and how, read back from the switch."""
    argv = inside(switch, "tc", "-j", "qdisc", "show")
    found: dict[str, str] = {}
    with suppress(DevclusterError, ValueError):
        shown: list[dict[str, Any]] = json.loads(run(argv))
        for each in shown:
            options = each.get("options", {})
            rate = options.get("rate")
            if each.get("kind") in ("tbf", "netem") and "dev" in each:
                bytes_per_s = rate["rate"] if isinstance(rate, dict) else rate
                found[each["dev"]] = f"{int(bytes_per_s or 0) * 8 / 1e6:g} Mbit/s"
    return found
