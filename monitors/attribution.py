"""Who is to blame: one verdict from all evidence of an incident.

`judge` is pure and total, and the order in which evidence arrives does not matter. A name is given
only where the evidence singles one out: a wrong name costs a healthy node and hides the sick one,
so no name is the better answer whenever two would be equally likely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from monitors import culprit, wording
from monitors.case import Case
from monitors.faults import Evidence, EvidenceKind, FaultKind, Verdict
from monitors.lines import error_key
from monitors.roots import Root, Tier, roots

__all__ = ["Evidence", "EvidenceKind", "judge"]

# Exit codes that mean a wrong command line wherever they occur: usage, not executable, not found.
_USAGE_CODES = frozenset({2, 126, 127})
_PROGRAM_FAULTS = frozenset({FaultKind.RANK_CRASHED, FaultKind.USER_ERROR})
_RANK_TIERS = frozenset({Tier.STRONG, Tier.WEAK, Tier.SILENT_EXIT})


def judge(evidence: Sequence[Evidence], *, world_size: int | None = None) -> Verdict:
    """Return the verdict on one incident.

    Args:
        evidence: Everything seen since the run was last well, in any order.
        world_size: Number of ranks, when known; "on every rank" is then checked against it.

    Returns:
        The root with the surest evidence. Secondary evidence alone, exits that we caused and no
        evidence at all give `unknown`.
    """
    case = Case(evidence)
    found = roots(case)
    for rule in _RULES:
        verdict = rule(case, found, world_size)
        if verdict is not None:
            return verdict
    return Verdict(
        fault=FaultKind.UNKNOWN,
        cause=wording.one_line(wording.nothing_tells(case)),
        discounted=wording.discounted(case, ()),
    )


_Rule = Callable[[Case, list[Root], int | None], Verdict | None]


def _verdict(
    case: Case, same: Sequence[Root], node: str | None, rank: int | None, cause: str
) -> Verdict:
    first = same[0]
    seqs = {seq for root in same for seq in root.evidence}
    # The exit of a rank belongs to the line that explains it.
    ranks = {r.rank for r in same} | {rank}
    seqs |= {e.seq for r, e in case.exits.items() if r in ranks}
    return Verdict(
        fault=first.fault,
        node=node or None,
        rank=rank,
        confidence=first.confidence,
        cause=wording.one_line(cause),
        evidence=tuple(sorted(seqs)),
        discounted=wording.discounted(case, seqs),
    )


def _ended_from_outside(case: Case, found: list[Root], _world: int | None) -> Verdict | None:
    """Slurm ended the job: nobody is to blame, unless a node was lost before."""
    first = next((r for r in found if r.tier is Tier.OUTSIDE), None)
    if first is None:
        return None
    if any(r.fault is FaultKind.NODE_LOST and r.at <= first.at for r in found):
        return None
    return _verdict(case, [first], None, None, first.text)


def _node(case: Case, found: list[Root], _world: int | None) -> Verdict | None:
    """A node is gone, or the kernel of a node reports broken hardware or a memory kill."""
    first = next((r for r in found if r.tier in (Tier.NODE, Tier.HOST_OOM)), None)
    if first is None:
        return None
    if first.fault is FaultKind.NODE_LOST:
        lost = [r for r in found if r.fault is FaultKind.NODE_LOST and r.node == first.node]
        return _verdict(case, lost, first.node, None, wording.node_lost(case, first, found))
    if first.fault is FaultKind.HOST_OOM:
        node = first.node or first.source.node
        rank = culprit.killed_on(case, node)
        cause = f"{wording.where(node, rank)} ran out of host memory: {first.text}"
        return _verdict(case, [first], node, rank, cause)
    same = culprit.copies(first, found)
    node_or_none = culprit.only_node(same)
    rank = culprit.failed_by_itself(case, node_or_none)
    cause = f"{wording.where(node_or_none or '', rank)}: {first.text}"
    return _verdict(case, same, node_or_none, rank, cause)


def _same_error_everywhere(case: Case, found: list[Root], world: int | None) -> Verdict | None:
    """Every rank fails alike before the first step: the program or its configuration is wrong."""
    if any((e.step or 0) > 0 for e in case.exits.values()):
        return None
    by_rank: dict[int, Root] = {}
    for root in found:
        if root.rank in case.exits and root.fault in _PROGRAM_FAULTS and root.tier in _RANK_TIERS:
            by_rank.setdefault(root.rank, root)
    if set(by_rank) != set(case.exits) or len(by_rank) < min(2, world or 2):
        return None
    if world is not None and len(by_rank) + len(case.ours) < world:
        return None
    errors = {(case.exits[rank].code, _error(root)) for rank, root in by_rank.items()}
    if len(errors) != 1 or not next(iter(errors))[1]:
        return None
    same = sorted(by_rank.values(), key=lambda r: (r.at, r.evidence))
    verdict = _verdict(case, same, None, None, wording.same_everywhere(case, same))
    return replace(verdict, fault=FaultKind.USER_ERROR, confidence=max(0.8, same[0].confidence))


def _error(root: Root) -> str:
    """Return what must be equal on all ranks; "" when it proves nothing."""
    if root.tier is not Tier.SILENT_EXIT:
        return root.key
    if root.source.text:
        return error_key(root.source.text)
    return root.key if root.source.code in _USAGE_CODES else ""


def _first_failure(case: Case, found: list[Root], _world: int | None) -> Verdict | None:
    """The earliest root among the surest ones; copies of it on other ranks take the name away."""
    if not found or found[0].tier not in (Tier.STRONG, Tier.WEAK, Tier.IDLE):
        return None
    first = found[0]
    same = culprit.copies(first, found)
    if first.fault is FaultKind.NETWORK:
        node, rank = culprit.voted(same), None
    else:
        node, rank = culprit.only_node(same), culprit.only_rank(same)
        if node and first.rank is None and first.source.rank is None:
            rank = culprit.failed_by_itself(case, node)
    verdict = _verdict(case, same, node, rank, wording.failure(same, node, rank))
    if first.fault is FaultKind.USER_ERROR:
        # Not on every rank, so it is about this place and not about the program as such.
        return replace(verdict, fault=FaultKind.RANK_CRASHED)
    return verdict


def _silent_exit(case: Case, found: list[Root], _world: int | None) -> Verdict | None:
    """A rank left without a word; several that did so are not told apart."""
    if not found or found[0].tier is not Tier.SILENT_EXIT:
        return None
    silent = [r for r in found if r.tier is Tier.SILENT_EXIT]
    if len(silent) == 1:
        node, rank = silent[0].node, silent[0].rank
        return _verdict(case, silent, node, rank, wording.failure(silent, node, rank))
    verdict = _verdict(case, silent, None, None, wording.several_silent(silent))
    return replace(verdict, fault=FaultKind.UNKNOWN, confidence=0.2)


def _hang(case: Case, found: list[Root], _world: int | None) -> Verdict | None:
    """Nothing failed, nothing moves. Whoever reports a hang is waiting, not causing it."""
    hangs = [r for r in found if r.tier is Tier.HANG]
    if not hangs:
        return None
    one = culprit.stands_still(case.overdue)
    if one is None:
        return _verdict(case, hangs, None, None, wording.hang(case, hangs))
    verdict = _verdict(case, hangs, one.node, one.rank, wording.stands_still(one))
    return replace(verdict, confidence=0.8)


_RULES: tuple[_Rule, ...] = (
    _ended_from_outside,
    _node,
    _same_error_everywhere,
    _first_failure,
    _silent_exit,
    _hang,
)
