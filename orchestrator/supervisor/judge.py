"""From the clues of an ended attempt to one verdict event; pure."""

from collections.abc import Mapping

from monitors.attribution import judge
from monitors.faults import CLASS_OF, Evidence, EvidenceKind, FaultKind
from orchestrator.core.events import FaultJudged
from orchestrator.core.node import Node
from orchestrator.core.state import Attempt, Clue


def verdict_on(attempt: Attempt, nodes: Mapping[str, Node]) -> FaultJudged:
    """Judge an attempt by everything that was seen of it.

    Nothing failed where the run left of its own accord, or where Slurm ended the allocation: its
    SIGTERM goes to the ranks as well, and one that dies of it takes the others along.
    """
    trouble = attempt.first_trouble
    if trouble is None and attempt.moved:
        return _free(attempt, FaultKind(attempt.moved), attempt.moved_why, attempt.moved_seq)
    cause = _end_of_allocation(trouble, nodes) if trouble is not None else ""
    if trouble is not None and cause:
        return _free(attempt, FaultKind.ALLOCATION_ENDED, cause, trouble.seq)
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


def _end_of_allocation(trouble: Clue, nodes: Mapping[str, Node]) -> str:
    """Say what tells that a whole allocation ended, and not one of its nodes; "" when nothing."""
    node = nodes.get(trouble.node)
    if node is None:
        return ""
    if node.warned == "TERM":
        return f"allocation {node.job} was ended by Slurm" if node.job else "Slurm ended the agents"
    own = [other for other in nodes.values() if node.job and other.job == node.job]
    if trouble.kind == "node_lost" and len(own) > 1 and not any(other.alive for other in own):
        return f"all {len(own)} nodes of allocation {node.job} are gone"
    return ""


def _free(attempt: Attempt, fault: FaultKind, cause: str, seq: int) -> FaultJudged:
    return FaultJudged(
        attempt=attempt.number,
        fault=fault.value,
        fault_class=CLASS_OF[fault].value,
        node=None,
        rank=None,
        confidence=1.0,
        cause=cause,
        evidence=(seq,),
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
