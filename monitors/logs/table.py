"""The table of failure signatures: known lines as data, checked when it is read."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Any

from monitors.errors import SignatureTableInvalid
from monitors.faults import FaultKind


class Culprit(StrEnum):
    """Whom a line blames.

    `reporter` is the place where the line was written, `peer` the address or host in the line's
    group `peer`, `node` the host in its group `node`. `none`: the line tells nothing about blame.
    """

    REPORTER = "reporter"
    PEER = "peer"
    NODE = "node"
    NONE = "none"


class Action(StrEnum):
    """What usually helps, as a hint to a person; the policy of the run decides."""

    RESTART_SAME_NODES = "restart_same_nodes"
    RESTART_EXCLUDING_NODE = "restart_excluding_node"
    DRAIN_NODE = "drain_node"
    STOP_AND_PAGE = "stop_and_page"
    RESUBMIT_FREE = "resubmit_free"
    FIND_ROOT = "find_root"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One known line.

    Attributes:
        id: Name in metrics and verdicts; a closed list.
        anchors: Literal texts; a line without any of them is not looked at further.
        pattern: What the line must contain, with groups `peer`, `node`, `rank`, `xid` where known.
        fault: What it points at.
        secondary: A consequence of another fault, never a root by itself.
        culprit: Whom it blames.
        confidence: 0..1, how surely this line alone means this fault.
        action: What usually helps.
        source: Public page that shows or explains the line.
        example: A line that this signature, and none before it, matches.
    """

    id: str
    anchors: tuple[str, ...]
    pattern: re.Pattern[str]
    fault: FaultKind
    secondary: bool
    culprit: Culprit
    confidence: float
    action: Action
    source: str
    example: str


_KEYS = frozenset(Signature.__dataclass_fields__)


def load(text: str | None = None) -> tuple[Signature, ...]:
    """Return the signatures in order of precedence.

    Args:
        text: A table in TOML; None means the one that comes with this package.

    Raises:
        SignatureTableInvalid: Naming the signature, the key and what is expected.
    """
    if text is None:
        text = resources.files("monitors.logs").joinpath("signatures.toml").read_text("utf-8")
    try:
        rows = tomllib.loads(text).get("signature", [])
    except tomllib.TOMLDecodeError as error:
        raise SignatureTableInvalid(f"signature table is not TOML: {error}") from error
    table = tuple(_signature(row) for row in rows)
    ids = [s.id for s in table]
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise SignatureTableInvalid(f"signature ids occur twice: {', '.join(twice)}")
    return table


def _signature(row: Mapping[str, Any]) -> Signature:
    name = row.get("id", "without id")
    wrong = _KEYS ^ row.keys()
    if wrong:
        word = "lacks" if wrong <= _KEYS else "has unknown"
        raise SignatureTableInvalid(f"signature {name} {word} keys: {', '.join(sorted(wrong))}")
    anchors = tuple(row["anchors"])
    if not anchors or not all(isinstance(a, str) and len(a) > 3 for a in anchors):
        raise SignatureTableInvalid(f"signature {name}: anchors must be texts of 4 or more letters")
    if not 0 < row["confidence"] <= 1:
        raise SignatureTableInvalid(f"signature {name}: confidence must lie in (0, 1]")
    try:
        return Signature(
            id=name,
            anchors=anchors,
            pattern=re.compile(row["pattern"]),
            fault=FaultKind(row["fault"]),
            secondary=bool(row["secondary"]),
            culprit=Culprit(row["culprit"]),
            confidence=float(row["confidence"]),
            action=Action(row["action"]),
            source=row["source"],
            example=row["example"],
        )
    except (ValueError, re.error) as error:
        raise SignatureTableInvalid(f"signature {name}: {error}") from error
