"""Finds known failure lines in a stream of log lines.

Nearly every line of a log is harmless, so the common path is one search for all literal anchors at
once. Only a line that holds one is looked at by the patterns, in the order of the table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from monitors.faults import Evidence, EvidenceKind, FaultKind
from monitors.logs.table import Action, Culprit, Signature, load

MAX_LINE_CHARS = 8192
MAX_TEXT_CHARS = 400

# Put before each line by srun --label and by torch (the global rank).
_PREFIX = re.compile(r"\s*(?:\d+: ?)?(?:\[rank(?P<rank>\d+)\]: ?)?")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]+|\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A known line.

    Attributes:
        signature: Id in the table.
        fault: What it points at.
        secondary: A consequence, never a root by itself.
        confidence: 0..1.
        culprit: Whom it blames.
        action: What usually helps.
        text: The line from the match on, bounded, without rank prefix and control characters.
        peer: Host or address that the line names, "" when it names none.
        rank: Global rank that wrote the line, when the line says so.
        xid: Number of a driver error, None for other lines.
    """

    signature: str
    fault: FaultKind
    secondary: bool
    confidence: float
    culprit: Culprit
    action: Action
    text: str
    peer: str = ""
    rank: int | None = None
    xid: int | None = None

    def evidence(self, *, seq: int, at: float, node: str, rank: int | None) -> Evidence:
        """Return what this line means for a judgement.

        Args:
            seq: Number of the event that carries it.
            at: Unix seconds at which the line was read.
            node: Where it was read.
            rank: Whose output it is; None for kernel and Slurm lines.
        """
        rank = self.rank if rank is None else rank
        blamed = {Culprit.REPORTER: node, Culprit.PEER: self.peer, Culprit.NODE: self.peer}
        return Evidence(
            seq=seq,
            at=at,
            kind=EvidenceKind.SIGNATURE,
            node=node,
            rank=rank,
            signature=self.signature,
            fault=self.fault,
            secondary=self.secondary,
            confidence=self.confidence,
            text=self.text,
            culprit_node=blamed.get(self.culprit, ""),
            culprit_rank=rank if self.culprit is Culprit.REPORTER else None,
        )


class Scanner:
    """Compiled once, used for every line. Holds no state between lines."""

    def __init__(self, table: Sequence[Signature] | None = None) -> None:
        self.table: tuple[Signature, ...] = load() if table is None else tuple(table)
        anchors = sorted({a for s in self.table for a in s.anchors}, key=len, reverse=True)
        # (?!) matches nothing: an empty table finds nothing.
        self._any = re.compile("|".join(map(re.escape, anchors)) or "(?!)")

    def scan(self, line: str | bytes) -> Match | None:
        """Return the first signature of the table that the line matches, None for other lines.

        Bytes that are not UTF-8 are replaced. Of a very long line the first and the last part are
        looked at: a message may stand behind a progress bar that never ended its line.
        """
        text = line.decode("utf-8", "replace") if isinstance(line, bytes) else line
        if len(text) > MAX_LINE_CHARS:
            half = MAX_LINE_CHARS // 2
            text = f"{text[:half]} {text[-half:]}"
        if self._any.search(text) is None:
            return None
        prefix = _PREFIX.match(text)
        assert prefix is not None, "every part of the prefix is optional"
        body = text[prefix.end() :].rstrip()
        for signature in self.table:
            if any(anchor in body for anchor in signature.anchors):
                found = signature.pattern.search(body)
                if found is not None:
                    return _match(signature, found, body, prefix["rank"])
        return None


def _match(signature: Signature, found: re.Match[str], body: str, prefix_rank: str | None) -> Match:
    groups = {name: value for name, value in found.groupdict().items() if value}
    rank = prefix_rank or groups.get("rank")
    # A match deep inside a long line is shown from itself on, others with the line's beginning.
    start = 0 if found.end() <= MAX_TEXT_CHARS else found.start()
    return Match(
        signature=signature.id,
        fault=signature.fault,
        secondary=signature.secondary,
        confidence=signature.confidence,
        culprit=signature.culprit,
        action=signature.action,
        text=_CONTROL.sub(" ", body[start : start + MAX_TEXT_CHARS]).strip(),
        peer=groups.get("peer", "") or groups.get("node", ""),
        rank=_small_int(rank),
        xid=_small_int(groups.get("xid")),
    )


def _small_int(text: str | None) -> int | None:
    """Return a number that a log may really hold; a run of a thousand digits is noise."""
    return int(text) if text and len(text) <= 9 and text.isdecimal() else None
