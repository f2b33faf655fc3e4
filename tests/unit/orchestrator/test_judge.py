from dataclasses import replace

import pytest

from monitors.faults import FaultKind
from orchestrator.core.events import FaultJudged
from orchestrator.core.node import Node
from orchestrator.core.state import Attempt, AttemptPhase, Clue
from orchestrator.supervisor import judge


def verdict_on(attempt: Attempt, *dead: str, **warned: str) -> FaultJudged:
    """The verdict, with the nodes that are gone and the signal that each was warned by."""
    nodes = {
        name: Node(
            name=name,
            incarnation="i",
            alive=name not in dead,
            address="",
            metrics_url="",
            joined_seq=1,
            job="7",
            warned=warned.get(name, ""),
        )
        for name in attempt.nodes
    }
    return judge.verdict_on(attempt, nodes)


def over(*clues: Clue) -> Attempt:
    """An attempt of two nodes with one rank each that ended with these clues."""
    return Attempt(
        number=3,
        nodes=("n0", "n1"),
        ranks_per_node=1,
        restore=None,
        phase=AttemptPhase.OVER,
        ordered_at=0.0,
        ordered_seq=1,
        clues=clues,
    )


def ended(
    seq: int, rank: int, code: int, *, ours: bool = False, step: int = 5, text: str = ""
) -> Clue:
    return Clue(
        seq=seq,
        at=float(seq),
        kind="exit",
        node=f"n{rank}",
        rank=rank,
        code=code,
        ours=ours,
        step=step,
        text=text,
    )


def test_a_signal_from_outside_is_a_killed_rank() -> None:
    verdict = verdict_on(over(ended(5, 1, -9), ended(6, 0, -15, ours=True)))
    assert (verdict.fault, verdict.fault_class) == ("rank_killed", "process")
    assert (verdict.attempt, verdict.rank) == (3, 1)
    assert 5 in verdict.evidence


def test_a_rank_that_we_stopped_is_never_to_blame() -> None:
    verdict = verdict_on(over(ended(6, 0, -15, ours=True), ended(7, 1, -15, ours=True)))
    assert verdict.fault == "unknown"
    assert verdict.rank is None
    assert verdict.node is None


def test_the_same_error_everywhere_before_the_first_step_is_the_users() -> None:
    text = "ModuleNotFoundError: No module named 'trian'"
    verdict = verdict_on(
        over(ended(5, 0, 1, step=-1, text=text), ended(6, 1, 1, step=-1, text=text))
    )
    assert (verdict.fault, verdict.fault_class) == ("user_error", "user")
    assert "trian" in verdict.cause


def test_the_same_error_after_a_step_is_not_the_users() -> None:
    text = "ValueError: bad batch"
    verdict = verdict_on(over(ended(5, 0, 1, text=text), ended(6, 1, 1, text=text)))
    assert verdict.fault_class != "user"


@pytest.mark.parametrize("why", ["silent for 15.2 s", "its agent's process is gone"])
def test_a_lost_node_is_to_blame_and_the_reason_is_told(why: str) -> None:
    lost = Clue(seq=4, at=4.0, kind="node_lost", node="n1", text=why, step=5)
    verdict = verdict_on(over(lost, ended(5, 0, 1, text="Connection reset by peer")))
    assert (verdict.fault, verdict.fault_class, verdict.node) == ("node_lost", "node", "n1")
    assert why in verdict.cause
    assert 4 in verdict.evidence


def test_a_rank_that_is_late_alone_is_a_hang() -> None:
    late = Clue(seq=4, at=4.0, kind="overdue", node="n0", rank=0, phase="step", step=7, for_s=3.0)
    verdict = verdict_on(over(late, ended(5, 0, -9, ours=True), ended(6, 1, -9, ours=True)))
    assert verdict.fault == "hang"


def test_a_stopped_process_is_told_by_what_is_abnormal_about_it() -> None:
    late = [
        Clue(seq=4, at=4.0, kind="overdue", node="n0", rank=0, phase="step", step=7, for_s=3.0),
        Clue(
            seq=5,
            at=4.1,
            kind="overdue",
            node="n1",
            rank=1,
            phase="step",
            step=7,
            for_s=2.9,
            text="process is stopped",
        ),
    ]
    verdict = verdict_on(over(*late))
    assert (verdict.fault, verdict.rank) == ("hang", 1)


def test_a_known_line_names_its_fault_and_culprit() -> None:
    line = Clue(
        seq=4,
        at=4.0,
        kind="signature",
        node="n0",
        rank=0,
        signature="cuda_ecc",
        fault="gpu_memory",
        confidence=0.9,
        culprit_node="n0",
        culprit_rank=0,
        text="CUDA error: uncorrectable ECC error encountered",
        step=7,
    )
    verdict = verdict_on(over(line, ended(5, 0, 1), ended(6, 1, -9, ours=True)))
    assert (verdict.fault, verdict.fault_class, verdict.node) == ("gpu_memory", "node", "n0")
    assert 4 in verdict.evidence


def test_no_evidence_at_all_is_unknown() -> None:
    verdict = verdict_on(over())
    assert verdict.fault == FaultKind.UNKNOWN.value
    assert verdict.evidence == ()
    assert verdict.cause


def test_a_planned_move_is_nobodys_fault() -> None:
    attempt = replace(over(), moved="moved", moved_why="n0 is to be left (drained)", moved_seq=9)
    verdict = verdict_on(attempt)
    assert (verdict.fault, verdict.fault_class) == ("moved", "free")
    assert (verdict.node, verdict.cause) == (None, "n0 is to be left (drained)")
    assert verdict.evidence == (9,)


def test_a_fault_during_a_planned_move_is_judged_as_a_fault() -> None:
    killed = ended(5, 1, -9)
    attempt = replace(over(killed), moved="moved", moved_seq=4, first_trouble=killed)
    assert verdict_on(attempt).fault == "rank_killed"


@pytest.mark.parametrize("code", [-15, 143, 1])
def test_ranks_that_end_with_their_allocation_have_not_failed(code: int) -> None:
    first = ended(5, 1, code)
    attempt = replace(over(first), first_trouble=first)
    verdict = verdict_on(attempt, n1="TERM")
    assert (verdict.fault, verdict.fault_class) == ("allocation_ended", "free")
    assert "7" in verdict.cause
    assert verdict_on(attempt, n1="USR2").fault_class == "process"


def test_the_loss_of_a_whole_allocation_is_no_nodes_fault() -> None:
    lost = Clue(seq=5, at=5.0, kind="node_lost", node="n1", text="its agent is gone")
    attempt = replace(over(lost), first_trouble=lost)
    verdict = verdict_on(attempt, "n0", "n1")
    assert (verdict.fault, verdict.node) == ("allocation_ended", None)
    assert verdict.cause == "all 2 nodes of allocation 7 are gone"
    assert verdict_on(attempt, "n1").node == "n1"
