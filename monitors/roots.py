"""From evidence to candidate roots: what could have come first, and what merely followed.

A rank that dies takes its peers with it: they fail in a collective some milliseconds later, and the
report of a peer may well arrive first. So time alone never decides. Every candidate gets a tier,
and time is compared only inside one tier.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from signal import Signals

from monitors.case import OUTSIDE_FAULTS, STRONG_CONFIDENCE, Case
from monitors.faults import Evidence, FaultKind
from monitors.lines import error_key, plain, signal_name

RESTORE_FAILED_CODE = 77
STAGE_REFUSED_CODE = 78
CHECKPOINT_DAMAGED_CODE = 79
STORE_AWAY_CODE = 80
_CRASH_SIGNALS = frozenset({4, 5, 7, 8, 11, 31})  # ILL, TRAP, BUS, FPE, SEGV, SYS
_NODE_FAULTS = frozenset({FaultKind.GPU, FaultKind.GPU_MEMORY})
_CODE_FAULTS = {
    RESTORE_FAILED_CODE: (FaultKind.RESTORE_FAILED, "the checkpoint could not be restored"),
    CHECKPOINT_DAMAGED_CODE: (FaultKind.RESTORE_FAILED, "the checkpoint is damaged"),
    STORE_AWAY_CODE: (FaultKind.STORE_AWAY, "the store did not answer"),
    STAGE_REFUSED_CODE: (FaultKind.STORAGE, "the checkpoint cannot be staged in shared memory"),
}


class Tier(IntEnum):
    """Order of evidence, the surest first."""

    OUTSIDE = 0  # Slurm ended the job: nothing failed
    NODE = 1  # kernel, Slurm or a silent agent about a whole node
    HOST_OOM = 2  # the kernel confirms a memory kill
    STRONG = 3  # a signal from outside, our own exit codes, a sure signature on a failed rank
    WEAK = 4  # a generic error on a failed rank
    SILENT_EXIT = 5  # an exit that nothing explains, before anything hung
    HANG = 6  # no progress, watchdogs
    IDLE = 7  # a sure signature, but its rank did not fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """One candidate. `key` is equal for copies of one error on several ranks.

    Attributes:
        tier: How sure this kind of evidence is.
        at: When it was seen.
        fault: What it would mean.
        key: Identity of the error, without the parts that differ from rank to rank.
        node: Node it blames or happened on, "" when it names none.
        rank: Rank it blames or happened on, None when it names none.
        confidence: 0..1.
        text: What a person should read.
        evidence: Numbers of the events behind it.
        source: The evidence that made it a candidate.
    """

    tier: Tier
    at: float
    fault: FaultKind
    key: str
    node: str
    rank: int | None
    confidence: float
    text: str
    evidence: tuple[int, ...]
    source: Evidence


def roots(case: Case) -> list[Root]:
    """Return all candidates, the best first; equal evidence in any order gives equal roots."""
    found = [
        *_outside(case),
        *_nodes(case),
        *_exits(case),
        *_lines(case),
        *_hangs(case),
    ]
    # In the node tier a line that names a node says more than one that does not.
    found.sort(key=lambda r: (r.tier, r.tier is Tier.NODE and not r.node, r.at, r.evidence))
    return found


def _of_line(tier: Tier, line: Evidence, *, named: bool = True) -> Root:
    node, rank = line.culprit_node, line.culprit_rank
    return Root(
        tier=tier,
        at=line.at,
        fault=line.fault,
        key=f"{line.signature} {error_key(line.text)}",
        node=node if named else "",
        rank=rank if named else None,
        confidence=line.confidence,
        text=plain(line.text),
        evidence=(line.seq,),
        source=line,
    )


def _outside(case: Case) -> Iterable[Root]:
    for line in case.signatures:
        if line.fault in OUTSIDE_FAULTS and not line.secondary:
            yield _of_line(Tier.OUTSIDE, line, named=False)


def _nodes(case: Case) -> Iterable[Root]:
    for lost in case.nodes_lost:
        yield Root(
            tier=Tier.NODE,
            at=lost.at,
            fault=FaultKind.NODE_LOST,
            key="node_lost",
            node=lost.node,
            rank=None,
            confidence=0.95,
            text=lost.why or "it does not answer",
            evidence=(lost.seq,),
            source=lost,
        )
    for line in case.signatures:
        if line.secondary:
            continue
        if line.fault is FaultKind.NODE_LOST:
            yield _of_line(Tier.NODE, line)
        # A kernel line of a node where no rank of ours failed is about somebody else's process.
        concerns_us = line.node in case.failed_nodes or not case.failed_nodes
        if line.rank is None and concerns_us:
            if line.fault in _NODE_FAULTS:
                yield _of_line(Tier.NODE, line)
            elif line.fault is FaultKind.HOST_OOM:
                yield _of_line(Tier.HOST_OOM, line)


def _exits(case: Case) -> Iterable[Root]:
    first_hang = min(
        [e.at for e in case.overdue]
        + [s.at for s in case.signatures if s.fault is FaultKind.HANG and not s.secondary],
        default=float("inf"),
    )
    for rank, exit_ in case.exits.items():
        if exit_.code in _CODE_FAULTS:
            fault, text = _CODE_FAULTS[exit_.code]
            if exit_.code == STAGE_REFUSED_CODE and (exit_.step or 0) > 0:
                fault = FaultKind.NODE_FULL  # the same state has found room before
            yield _of_exit(Tier.STRONG, exit_, fault, exit_.text or text, 0.95)
        elif exit_.signal == Signals.SIGKILL:
            yield _of_exit(Tier.STRONG, exit_, FaultKind.RANK_KILLED, "killed by SIGKILL", 0.8)
        elif exit_.signal in _CRASH_SIGNALS:
            text = f"ended by {signal_name(exit_.signal or 0)}"
            yield _of_exit(Tier.STRONG, exit_, FaultKind.RANK_CRASHED, text, 0.7)
        elif case.follows(rank) is None and not case.own_lines(rank) and exit_.at <= first_hang:
            yield _silent(exit_)


def _silent(exit_: Evidence) -> Root:
    if exit_.signal is None:
        text = plain(exit_.text) or f"exited with code {exit_.code} and left no error"
        return _of_exit(Tier.SILENT_EXIT, exit_, FaultKind.RANK_CRASHED, text, 0.4)
    told = exit_.signal != Signals.SIGABRT
    fault = FaultKind.RANK_KILLED if told else FaultKind.RANK_CRASHED
    text = f"ended by {signal_name(exit_.signal)}"
    return _of_exit(Tier.SILENT_EXIT, exit_, fault, text, 0.4)


def _of_exit(tier: Tier, exit_: Evidence, fault: FaultKind, text: str, confidence: float) -> Root:
    return Root(
        tier=tier,
        at=exit_.at,
        fault=fault,
        key=f"{exit_.code} {exit_.signal}",
        node=exit_.node,
        rank=exit_.rank,
        confidence=confidence,
        text=plain(text),
        evidence=(exit_.seq,),
        source=exit_,
    )


def _lines(case: Case) -> Iterable[Root]:
    for rank in sorted(case.failed_ranks):
        exit_ = case.exits.get(rank)
        if exit_ is not None and exit_.code in _CODE_FAULTS:
            continue  # its own exit code says it better than its traceback
        own = case.own_lines(rank)
        if own:
            sure = own[0].confidence >= STRONG_CONFIDENCE
            yield _of_line(Tier.STRONG if sure else Tier.WEAK, own[0])
    for line in case.signatures:
        sure = line.confidence >= STRONG_CONFIDENCE and not line.secondary
        idle = line.rank not in case.failed_ranks and line.fault not in OUTSIDE_FAULTS
        if sure and idle and line.fault is not FaultKind.HANG:
            yield _of_line(_idle_tier(case, line), line)


def _idle_tier(case: Case, line: Evidence) -> Tier:
    """A kernel line about a program counts as that program's when a rank failed on its node."""
    is_program = line.fault is FaultKind.RANK_CRASHED and line.rank is None
    return Tier.STRONG if is_program and line.node in case.failed_nodes else Tier.IDLE


def _hangs(case: Case) -> Iterable[Root]:
    for line in case.signatures:
        if line.fault is FaultKind.HANG and not line.secondary:
            # The watchdog that speaks first only waited first.
            yield _of_line(Tier.HANG, line, named=False)
    for late in case.overdue:
        yield Root(
            tier=Tier.HANG,
            at=late.at,
            fault=FaultKind.HANG,
            key="overdue",
            node=late.node,
            rank=late.rank,
            confidence=0.6,
            text=late.why,
            evidence=(late.seq,),
            source=late,
        )
