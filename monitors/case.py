"""All evidence of one incident, put in order once and indexed by rank."""

from __future__ import annotations

from collections.abc import Sequence

from monitors.faults import Evidence, EvidenceKind, FaultKind

# Below this a signature is a guess: a generic traceback, an error that is often retried.
STRONG_CONFIDENCE = 0.6
# A line this much older than the exit was survived, so it did not end the process.
STALE_S = 30.0

OUTSIDE_FAULTS = frozenset({FaultKind.PREEMPTED, FaultKind.TIME_LIMIT})


class Case:
    """What was seen, sorted into exits, hangs, lost nodes and known lines."""

    def __init__(self, evidence: Sequence[Evidence]) -> None:
        ordered = sorted(evidence, key=lambda e: (e.at, e.seq, repr(e)))
        self.evidence: tuple[Evidence, ...] = tuple(ordered)
        self.exits: dict[int, Evidence] = {}
        self.ours: set[int] = set()
        self.overdue: list[Evidence] = []
        self.nodes_lost: list[Evidence] = []
        self.signatures: list[Evidence] = []
        for item in ordered:
            self._index(item)
        self.ours -= set(self.exits)
        failed = [*self.exits.values(), *self.overdue]
        self.failed_ranks = {e.rank for e in failed if e.rank is not None}
        self.failed_nodes = {e.node for e in failed}

    def _index(self, item: Evidence) -> None:
        if item.kind is EvidenceKind.SIGNATURE:
            self.signatures.append(item)
        elif item.kind is EvidenceKind.OVERDUE:
            self.overdue.append(item)
        elif item.kind is EvidenceKind.NODE_LOST:
            self.nodes_lost.append(item)
        elif item.rank is not None and item.ours:
            self.ours.add(item.rank)
        elif item.rank is not None and (item.signal is not None or item.code):
            self.exits.setdefault(item.rank, item)

    def of_rank(self, rank: int | None) -> list[Evidence]:
        """Return the signatures that this rank wrote, in order."""
        return [s for s in self.signatures if s.rank == rank]

    def follows(self, rank: int) -> Evidence | None:
        """Return the line that shows this rank to be a victim: secondary, or a watchdog's."""
        for line in self.of_rank(rank):
            if line.secondary or line.fault is FaultKind.HANG:
                return line
        return None

    def own_lines(self, rank: int) -> list[Evidence]:
        """Return the lines of a rank that may be its root, the surest first, then the earliest.

        A generic error after a connection error of the same rank is that error passed on.
        """
        lines = self.of_rank(rank)
        exit_ = self.exits.get(rank)
        if exit_ is not None:
            lines = [s for s in lines if exit_.at - s.at <= STALE_S] or lines
        victim_at = min(((s.at, s.seq) for s in lines if s.secondary), default=None)
        own = [
            s
            for s in lines
            if not s.secondary
            and s.fault is not FaultKind.HANG
            and s.fault not in OUTSIDE_FAULTS
            and (
                s.confidence >= STRONG_CONFIDENCE or victim_at is None or (s.at, s.seq) < victim_at
            )
        ]
        return sorted(own, key=lambda s: (-s.confidence, s.at, s.seq))
