"""Which name the evidence singles out, and when it singles out none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from signal import Signals

from monitors.case import STRONG_CONFIDENCE, Case
from monitors.faults import Evidence, FaultKind
from monitors.roots import Root

# Copies of one error on several ranks arrive within this time, kills of one blow within the other.
COPIES_WITHIN_S = 10.0
KILLS_WITHIN_S = 1.0


def copies(first: Root, found: Iterable[Root]) -> list[Root]:
    """Return the roots that are the same blow as `first`, itself included."""
    within = KILLS_WITHIN_S if first.fault is FaultKind.RANK_KILLED else COPIES_WITHIN_S
    mark = (first.source.signature, first.source.code, first.source.signal)
    return [
        r
        for r in found
        if r is first
        or (
            r.tier is first.tier
            and r.fault is first.fault
            and r.at - first.at <= within
            and (r.source.signature, r.source.code, r.source.signal) == mark
        )
    ]


def only_node(same: Iterable[Root]) -> str | None:
    """Return the node that all roots share; None when they differ or one names no node."""
    nodes = {r.node for r in same}
    return (nodes.pop() or None) if len(nodes) == 1 else None


def only_rank(same: Iterable[Root]) -> int | None:
    """Return the rank that all roots share; None when they differ or one names no rank."""
    ranks = {r.rank for r in same}
    return ranks.pop() if len(ranks) == 1 else None


def voted(same: Sequence[Root]) -> str | None:
    """Name a node for a broken connection.

    A node that reports its own port is to blame. Otherwise reporter, peer and the link between
    them are equally likely until at least two nodes name the same peer, and more than name another.
    """
    own = {r.node for r in same if r.node and r.node == r.source.node}
    if own:
        return own.pop() if len(own) == 1 else None
    votes = Counter(peer for peer, _ in {(r.node, r.source.node) for r in same if r.node})
    ranking = votes.most_common(2)
    if not ranking or ranking[0][1] < 2:
        return None
    if len(ranking) == 2 and ranking[1][1] == ranking[0][1]:
        return None
    return ranking[0][0]


def failed_by_itself(case: Case, node: str | None) -> int | None:
    """Return the one rank of `node` that failed without following somebody else, if it is one."""
    if not node:
        return None
    ranks = {
        rank
        for rank, exit_ in case.exits.items()
        if exit_.node == node and (exit_.signal == Signals.SIGKILL or case.follows(rank) is None)
    }
    ranks |= {
        rank
        for rank in case.failed_ranks
        if any(s.node == node and s.confidence >= STRONG_CONFIDENCE for s in case.own_lines(rank))
    }
    return ranks.pop() if len(ranks) == 1 else None


def killed_on(case: Case, node: str) -> int | None:
    """Return the one rank of `node` that SIGKILL ended, if it is one."""
    ranks = [r for r, e in case.exits.items() if e.node == node and e.signal == Signals.SIGKILL]
    return ranks[0] if len(ranks) == 1 else None


def stands_still(late: Sequence[Evidence]) -> Evidence | None:
    """Return the one overdue rank that is abnormal by itself or strictly behind all others.

    A collective holds all ranks at one step, and which of them is reported overdue first depends on
    when it was looked at: that alone names nobody.
    """
    odd = [e for e in late if e.why]
    if odd:
        return odd[0] if len({e.rank for e in odd}) == 1 else None
    steps = {e.rank: e.step for e in late}
    known = [s for s in steps.values() if s is not None]
    if len(steps) < 2 or len(known) != len(steps):
        return None
    lowest = [rank for rank, step in steps.items() if step == min(known)]
    if len(lowest) != 1:
        return None
    return next(e for e in late if e.rank == lowest[0])
