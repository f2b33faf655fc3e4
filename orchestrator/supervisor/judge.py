"""From the clues of an ended attempt to one verdict event; pure."""

from monitors.attribution import judge
from monitors.faults import Evidence, EvidenceKind, FaultKind
from orchestrator.core.events import FaultJudged
from orchestrator.core.state import Attempt, Clue


def verdict_on(attempt: Attempt) -> FaultJudged:
    """Judge an attempt by everything that was seen of it."""
    verdict = judge([_evidence(clue) for clue in attempt.clues], world_size=attempt.world)
    return FaultJudged(
        attempt=attempt.number,
        fault=verdict.fault.value,
        fault_class=verdict.fault_class.value,
        node=verdict.node,
        rank=verdict.rank,
        confidence=verdict.confidence,
        cause=verdict.cause,
        evidence=verdict.evidence,
        discounted=verdict.discounted,
    )


def _evidence(clue: Clue) -> Evidence:
    killed = clue.kind == "exit" and clue.code < 0
    return Evidence(
        seq=clue.seq,
        at=clue.at,
        kind=EvidenceKind(clue.kind),
        node=clue.node,
        rank=clue.rank,
        code=None if killed or clue.kind != "exit" else clue.code,
        signal=-clue.code if killed else None,
        ours=clue.ours,
        step=clue.step if clue.step > 0 else None,
        phase=clue.phase,
        for_s=clue.for_s,
        signature=clue.signature,
        fault=FaultKind(clue.fault) if clue.fault else FaultKind.UNKNOWN,
        secondary=clue.secondary,
        confidence=clue.confidence,
        text=clue.text if clue.kind in ("exit", "signature") else "",
        culprit_node=clue.culprit_node,
        culprit_rank=clue.culprit_rank,
        why=clue.text if clue.kind in ("node_lost", "overdue") else "",
    )
