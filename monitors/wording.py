"""The sentences of a verdict: one clear line for the person who is woken up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from monitors.case import Case
from monitors.faults import Evidence, EvidenceKind, FaultKind
from monitors.lines import plain, signal_name
from monitors.roots import Root

MAX_CAUSE_CHARS = 300
MAX_DISCOUNTED = 20
_MAX_NAMED_RANKS = 8


def one_line(text: str) -> str:
    """Return `text` on one line of bounded length."""
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_CAUSE_CHARS else flat[: MAX_CAUSE_CHARS - 3] + "..."


def where(node: str, rank: int | None) -> str:
    """Return `rank 1 on n1`, `node n1`, `rank 1` or `several nodes`."""
    if rank is None:
        return f"node {node}" if node else "several nodes"
    return f"rank {rank} on {node}" if node else f"rank {rank}"


def ranks_text(ranks: Iterable[int | None]) -> str:
    """Return `rank 3`, `ranks 1, 2` or a count when there are many."""
    known = sorted({r for r in ranks if r is not None})
    if len(known) == 1:
        return f"rank {known[0]}"
    if len(known) > _MAX_NAMED_RANKS:
        return f"{len(known)} ranks"
    return f"ranks {', '.join(str(r) for r in known)}"


def failure(same: Sequence[Root], node: str | None, rank: int | None) -> str:
    """Return the line for a failure of one rank, or of several in the same way."""
    first = same[0]
    hit = {r.source.rank for r in same if r.source.rank is not None}
    if rank is not None:
        who = where(node or "", rank)
        step = max((r.source.step or 0 for r in same), default=0)
        who += f" after step {step}" if step > 0 else ""
    elif len(hit) > 1:
        who = ranks_text(hit) + (f" on {node}" if node else "")
    elif node:
        who = where(node, None)
    elif hit:
        who = f"{ranks_text(hit)} reports"
    else:
        return first.text
    return f"{who}: {first.text}"


def node_lost(case: Case, first: Root, found: Iterable[Root]) -> str:
    """Return the line for a lost node, with the ranks that went with it."""
    if not first.node:
        return first.text
    cause = f"node {first.node} is gone: {first.text}"
    ranks = [r for r, e in case.exits.items() if e.node == first.node]
    if ranks:
        cause += f"; {ranks_text(ranks)} went with it"
    others = {r.node for r in found if r.fault is FaultKind.NODE_LOST and r.node}
    others.discard(first.node)
    return cause + (f"; gone as well: {', '.join(sorted(others))}" if others else "")


def same_everywhere(case: Case, same: Sequence[Root]) -> str:
    """Return the line for one error on all ranks."""
    ended = " that ended by themselves" if case.ours else ""
    count = "the only rank" if len(same) == 1 else f"all {len(same)} ranks{ended}"
    return f"{count} failed before the first step: {same[0].text}"


def several_silent(silent: Sequence[Root]) -> str:
    """Return the line for several exits without a word."""
    ranks = ranks_text(r.rank for r in silent)
    signals = {r.source.signal for r in silent}
    signal = signals.pop() if len(signals) == 1 else None
    if signal is not None:
        return f"{ranks} ended by {signal_name(signal)} that we did not send"
    return f"{ranks} exited and left no error that tells which failed first"


def stands_still(late: Evidence) -> str:
    """Return the line for the one rank that does not move."""
    why = f" ({late.why})" if late.why else ""
    return (
        f"{where(late.node, late.rank)} stands still{why} in phase {late.phase or 'step'} "
        f"{_after(late.step)} while the others wait for it"
    )


def hang(case: Case, hangs: Sequence[Root]) -> str:
    """Return the line for a hang without a culprit."""
    if not case.overdue:
        return f"a collective timed out and no line tells who did not come: {hangs[0].text}"
    worst = max(case.overdue, key=lambda e: (e.for_s, -e.seq))
    return (
        f"no progress: {ranks_text(e.rank for e in case.overdue)} in phase "
        f"{worst.phase or 'step'} {_after(worst.step)}, {worst.for_s:.0f} s overdue; "
        "no rank stands out"
    )


def _after(step: int | None) -> str:
    return f"after step {step}" if step is not None and step > 0 else "before the first step"


def nothing_tells(case: Case) -> str:
    """Return the line for a verdict of unknown."""
    if case.exits:
        return f"{ranks_text(case.exits)} ended because a peer was gone; no line tells which or why"
    if case.ours:
        return "nothing failed: we stopped these ranks"
    if case.evidence:
        return "only consequences were seen; the failure itself left no trace"
    return "no evidence"


def discounted(case: Case, followed: Collection[int]) -> tuple[str, ...]:
    """Return one line for each piece of evidence that was not followed, at most a page."""
    lines = [_reason(case, e) for e in case.evidence if e.seq not in followed]
    kept = [line for line in dict.fromkeys(lines) if line]
    if len(kept) > MAX_DISCOUNTED:
        more = len(kept) - MAX_DISCOUNTED + 1
        kept = [*kept[: MAX_DISCOUNTED - 1], f"and {more} more"]
    return tuple(kept)


def _reason(case: Case, item: Evidence) -> str:
    who = where(item.node, item.rank) if item.node or item.rank is not None else "the job"
    if item.kind is EvidenceKind.EXIT:
        return _exit_reason(case, item, who)
    if item.kind is EvidenceKind.OVERDUE:
        return f"{who} waits for the others"
    if item.kind is EvidenceKind.NODE_LOST:
        return f"{who} was lost too"
    if item.secondary:
        return one_line(f"{who}, a consequence: {plain(item.text)}")
    if item.fault is FaultKind.HANG:
        return one_line(f"{who} reports a hang and does not cause it: {plain(item.text)}")
    return one_line(f"{who}, later or less sure: {plain(item.text)}")


def _exit_reason(case: Case, item: Evidence, who: str) -> str:
    if item.ours:
        return f"{who}: we stopped it"
    if item.signal is None and not item.code:
        return f"{who} ended normally"
    how = f"code {item.code}" if item.signal is None else signal_name(item.signal)
    line = case.follows(item.rank) if item.rank is not None else None
    return f"{who} ended with {how} " + ("because a peer was gone" if line else "later")
