"""What Slurm's commands print about nodes and reservations. Pure: text in, values out.

Source of the words: scontrol(1), sinfo(1), "NODE STATE CODES".
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from orchestrator.launch.slurm_text import (
    decoded,
    expand,
    one_line,
    records_of,
    value_of,
    word_of,
)

SINFO_FORMAT = "%N|%T|%E"
NOTICE = timedelta(minutes=30)

# What ends everything on a node. Not FAIL or FAILING (it is expected to fail, and its job runs on),
# not NOT_RESPONDING or "*" (perhaps only busy), not DRAIN. "~" and "%" are powered down and
# powering down in sinfo.
GONE_WORDS = frozenset({"DOWN", "POWERED_DOWN", "POWERING_DOWN", "POW_DN"})
GONE_MARKS = ("~", "%")
MARKS = "*~#!%$@^-"

# In the order in which they are looked for: a node that is to be rebooted is drained as well.
WANTED_BACK: Mapping[str, str] = {
    "REBOOT_REQUESTED": "to be rebooted",
    "REBOOT_ISSUED": "to be rebooted",
    "REBOOT": "to be rebooted",
    "FAIL": "expected to fail",
    "FAILING": "expected to fail",
    "DRAIN": "drained",
    "DRAINING": "drained",
    "DRAINED": "drained",
    "DRNG": "drained",
    "POWER_DOWN": "to be powered down",
}
MAINTENANCE = frozenset({"MAINT", "MAINTENANCE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node as Slurm describes it.

    Attributes:
        state: As Slurm writes it, `MIXED+DRAIN`.
        reason: Why it is so, as somebody wrote it; "" when nobody did.
        since: When that was written, None when it is not told.
    """

    name: str
    state: str
    reason: str
    since: datetime | None

    @property
    def words(self) -> frozenset[str]:
        """The words of its state, without marks."""
        return frozenset(word.rstrip(MARKS) for word in self.state.strip().upper().split("+"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Nodes that are set aside for a time."""

    name: str
    nodes: tuple[str, ...]
    is_maintenance: bool
    start: datetime | None
    end: datetime | None


def scontrol_nodes(output: bytes) -> dict[str, NodeView]:
    """Read `scontrol show node`."""
    views = (_node(record) for record in records_of(decoded(output), "NodeName"))
    return {view.name: view for view in views}


def _node(record: str) -> NodeView:
    # Further lines of a reason are indented more than any field is.
    match = re.search(r"^\s+Reason=(.*(?:\n {8,}\S.*)*)", record, flags=re.MULTILINE)
    said = match[1] if match else ""
    stamp = re.search(r"\s*\[[^\s@\[\]]+@([^\s\]]+)\]", said)
    return NodeView(
        name=word_of(record, "NodeName"),
        state=word_of(record, "State"),
        reason=one_line(said.replace(stamp[0], " ") if stamp else said),
        since=moment(stamp[1]) if stamp else None,
    )


def sinfo_nodes(output: bytes) -> dict[str, str]:
    """Read `sinfo --noheader --Node --format=SINFO_FORMAT`; of several lines the first counts."""
    found: dict[str, str] = {}
    for line in decoded(output).split("\n"):
        name, bar, rest = line.partition("|")
        state, second, _ = rest.partition("|")
        if bar and second and name:
            found.setdefault(name, state)
    return found


def scontrol_reservations(output: bytes) -> tuple[Reservation, ...]:
    """Read `scontrol show reservation`; its words for none are none."""
    return tuple(
        Reservation(
            name=word_of(record, "ReservationName"),
            nodes=expand(word_of(record, "Nodes")),
            is_maintenance="MAINT" in word_of(record, "Flags").upper().split(","),
            start=moment(word_of(record, "StartTime")),
            end=moment(word_of(record, "EndTime")),
        )
        for record in records_of(decoded(output), "ReservationName")
    )


def is_gone(state: str) -> bool:
    """Whether nothing can run on a node in this state; False also for words not known here."""
    words = state.strip().upper().split("+")
    bare = {word.rstrip(MARKS) for word in words}
    marks = "".join(word[len(word.rstrip(MARKS)) :] for word in words)
    return bool(bare & GONE_WORDS) or any(mark in marks for mark in GONE_MARKS)


def leaving(
    nodes: Iterable[NodeView], reservations: Iterable[Reservation], now: datetime, own: str
) -> dict[str, str]:
    """Say which nodes the site wants back although they work, and why.

    Args:
        nodes: Those to look at; one that is gone is none that leaves.
        reservations: All of the site's.
        now: On the clock of whoever asked Slurm, which writes times so.
        own: The reservation that the run itself uses, "" for none.
    """
    kept = {
        name: f"reserved for maintenance ({found.name})"
        for found in reservations
        if found.is_maintenance and found.name != own and _is_near(found, now)
        for name in found.nodes
    }
    told: dict[str, str] = {}
    for node in nodes:
        if is_gone(node.state):
            continue
        why = next((text for word, text in WANTED_BACK.items() if word in node.words), "")
        if why:
            told[node.name] = f"{why}: {node.reason}" if node.reason else why
        elif node.name in kept:
            told[node.name] = kept[node.name]
        elif node.words & MAINTENANCE and not own:
            told[node.name] = "reserved for maintenance"
    return told


def _is_near(found: Reservation, now: datetime) -> bool:
    has_begun = found.start is not None and found.start <= now + NOTICE
    return has_begun and (found.end is None or found.end > now)


def moment(text: str) -> datetime | None:
    """Read a time as Slurm writes it, None for its words for none."""
    try:
        return datetime.fromisoformat(value_of(text)).replace(tzinfo=None)
    except ValueError:
        return None
