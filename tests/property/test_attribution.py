from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from monitors.attribution import judge
from monitors.faults import CLASS_OF, Evidence, EvidenceKind, FaultKind

NODES = ["n1", "n2", "n3"]


@st.composite
def any_evidence(draw: st.DrawFn) -> Evidence:
    rank = draw(st.none() | st.integers(0, 5))
    node = draw(st.sampled_from(NODES))
    fault = draw(st.sampled_from(FaultKind))
    signal = draw(st.none() | st.sampled_from([6, 9, 11, 15, 200]))
    blames = draw(st.booleans())
    return Evidence(
        seq=draw(st.integers(0, 40)),
        at=draw(st.sampled_from([0.0, 0.001, 1.0, 2.5, 60.0])),
        kind=draw(st.sampled_from(EvidenceKind)),
        node=node,
        rank=rank,
        code=None if signal else draw(st.sampled_from([0, 1, 2, 77, 78])),
        signal=signal,
        ours=draw(st.booleans()),
        step=draw(st.none() | st.integers(-1, 3)),
        for_s=draw(st.sampled_from([0.0, 5.0])),
        signature=draw(st.sampled_from(["", "a", "b"])),
        fault=fault,
        secondary=draw(st.booleans()),
        confidence=draw(st.sampled_from([0.3, 0.6, 0.9])),
        text=draw(st.sampled_from(["", "[rank1]: KeyError: 1", "[rank2]: KeyError: 2", "x\ny"])),
        culprit_node=node if blames else draw(st.sampled_from(["", *NODES])),
        culprit_rank=rank if blames else None,
        why=draw(st.sampled_from(["", "stopped"])),
    )


@given(st.lists(any_evidence(), max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_arrival_never_changes_a_verdict(
    evidence: list[Evidence], order: random.Random
) -> None:
    shuffled = list(evidence)
    order.shuffle(shuffled)
    assert judge(shuffled) == judge(evidence)


@given(st.lists(any_evidence(), max_size=12), st.none() | st.integers(1, 6))
def test_every_heap_of_evidence_gives_a_whole_verdict(
    evidence: list[Evidence], world_size: int | None
) -> None:
    verdict = judge(evidence, world_size=world_size)
    assert verdict.fault in CLASS_OF
    assert 0.0 <= verdict.confidence <= 1.0
    assert "\n" not in verdict.cause
    assert set(verdict.evidence) <= {e.seq for e in evidence}
    assert verdict.node != ""
    if verdict.fault is FaultKind.UNKNOWN and verdict.cause == "no evidence":
        assert not evidence


def victim(seq: int, at: float, rank: int) -> list[Evidence]:
    node = f"n{rank // 2}"
    said = Evidence(
        seq=seq,
        at=at,
        kind=EvidenceKind.SIGNATURE,
        node=node,
        rank=rank,
        signature="gloo_peer_closed",
        fault=FaultKind.NETWORK,
        secondary=True,
        confidence=0.9,
        text=f"[rank{rank}]: RuntimeError: Connection closed by peer",
    )
    left = Evidence(
        seq=seq + 1, at=at, kind=EvidenceKind.EXIT, node=node, rank=rank, code=1, step=9
    )
    return [said, left]


@st.composite
def one_blow(draw: st.DrawFn) -> tuple[list[Evidence], list[Evidence], int]:
    """The evidence of one rank's death, that of its victims, and the rank."""
    world = draw(st.integers(2, 8))
    culprit = draw(st.integers(0, world - 1))
    node = f"n{culprit // 2}"
    root = [
        Evidence(
            seq=1000,
            at=10.0,
            kind=EvidenceKind.EXIT,
            node=node,
            rank=culprit,
            step=9,
            code=None if (killed := draw(st.booleans())) else 1,
            signal=9 if killed else None,
        )
    ]
    if not killed:
        root.append(
            Evidence(
                seq=999,
                at=10.0,
                kind=EvidenceKind.SIGNATURE,
                node=node,
                rank=culprit,
                signature="python_exception",
                fault=FaultKind.RANK_CRASHED,
                confidence=0.4,
                text="KeyError: 'lr'",
                culprit_node=node,
                culprit_rank=culprit,
            )
        )
    victims: list[Evidence] = []
    for rank in range(world):
        if rank != culprit:
            at = 10.0 + draw(st.floats(-0.05, 0.5))
            victims += victim(10 * rank + 1, at, rank)
    return root, victims, culprit


@given(one_blow())
def test_victims_never_take_the_blame_however_early_they_speak(
    blow: tuple[list[Evidence], list[Evidence], int],
) -> None:
    root, victims, culprit = blow
    verdict = judge([*victims, *root])
    assert (verdict.rank, verdict.node) == (culprit, f"n{culprit // 2}")
    assert set(verdict.evidence) == {e.seq for e in root}


@given(one_blow())
def test_without_the_root_the_victims_are_unknown_and_not_guilty(
    blow: tuple[list[Evidence], list[Evidence], int],
) -> None:
    _, victims, _ = blow
    verdict = judge(victims)
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.UNKNOWN, None, None)


@given(one_blow(), st.data())
def test_less_secondary_evidence_never_moves_the_blame_to_another(
    blow: tuple[list[Evidence], list[Evidence], int], data: st.DataObject
) -> None:
    root, victims, culprit = blow
    kept = data.draw(st.lists(st.sampled_from(victims), unique_by=lambda e: e.seq))
    assert judge([*kept, *root]).rank in (culprit, None)


@given(st.lists(any_evidence(), max_size=12))
def test_exits_that_we_caused_and_secondary_lines_never_make_a_root(
    evidence: list[Evidence],
) -> None:
    harmless = [
        replace(e, ours=True, secondary=True)
        for e in evidence
        if e.kind in (EvidenceKind.EXIT, EvidenceKind.SIGNATURE)
    ]
    verdict = judge(harmless)
    assert (verdict.fault, verdict.node, verdict.rank) == (FaultKind.UNKNOWN, None, None)
