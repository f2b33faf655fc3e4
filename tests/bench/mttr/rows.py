"""The table and the JSON: what was measured beside what, with the targets."""

import statistics
from collections.abc import Sequence
from typing import Any

from tests.bench.mttr import ours, theirs

HANG_LIMIT = "<= 3 x the median step + 10 s"
Row = dict[str, Any]


def compared(
    figure: str,
    found: Sequence[ours.Recovery],
    peer: str,
    peers: Sequence[theirs.Recovery],
    times_faster: float,
    why: str,
) -> Row:
    """Return one comparison; without a peer's figure `why` says why there is none."""
    value = statistics.median(recovery.total_s for recovery in found) if found else None
    peer_value = statistics.median(recovery.total_s for recovery in peers) if peers else None
    ratio = peer_value / value if value and peer_value else None
    return {
        "figure": figure,
        "value": value,
        "unit": "s",
        "peer": peer,
        "peer_value": peer_value,
        "ratio": ratio,
        "target": f"peer / ours >= {times_faster:g}",
        "met": None if ratio is None else ratio >= times_faster,
        **({"why": why} if ratio is None else {}),
        "all": [round(recovery.total_s, 2) for recovery in found],
        "peer_all": [round(recovery.total_s, 2) for recovery in peers],
        "load": [round(r.load, 1) for r in found] + [round(r.load, 1) for r in peers],
    }


def hang(found: Sequence[ours.Recovery], why: str) -> list[Row]:
    """Return how long a hang went unseen, and the whole recovery."""
    value = statistics.median(r.phases["detect"] for r in found) if found else None
    limit = 3 * statistics.median(r.step_s for r in found) + 10 if found else None
    detect = {
        "figure": f"hang (SIGSTOP of one rank), timeouts.step_s = {ours.STEP_LIMIT_S:g}: detect",
        "value": value,
        "unit": "s",
        "peer": "3 x the median step + 10 s",
        "peer_value": limit,
        "ratio": value / limit if value is not None and limit else None,
        "target": HANG_LIMIT,
        "met": value <= limit if value is not None and limit else None,
        **({} if found else {"why": why}),
        "all": [round(r.phases["detect"], 2) for r in found],
        "load": [round(r.load, 1) for r in found],
    }
    reason = why if not found else "reported only"
    total = _alone("hang (SIGSTOP of one rank): recover", [r.total_s for r in found], reason)
    return [detect, total]


def phases(fault: str, found: Sequence[ours.Recovery]) -> list[Row]:
    """Return the median of each phase of ours; they need not add up to the median of all."""
    if not found:
        return []
    medians = {name: statistics.median(r.phases[name] for r in found) for name in ours.PHASES}
    largest = max(medians, key=medians.__getitem__)
    return [
        _alone(
            f"{fault}: {name}{' (largest phase)' if name == largest else ''}",
            [r.phases[name] for r in found],
            "a phase of a recovery, without a target of its own",
        )
        for name in ours.PHASES
    ]


def _alone(figure: str, values: Sequence[float], why: str) -> Row:
    return {
        "figure": figure,
        "value": statistics.median(values) if values else None,
        "unit": "s",
        "peer": None,
        "peer_value": None,
        "ratio": None,
        "target": None,
        "met": None,
        "why": why,
        "all": [round(value, 3) for value in values],
    }


def line(row: Row) -> str:
    """Render a row for a person."""
    text = f"{row['figure']:<52} {_seconds(row['value'])}"
    if row["peer"] is None:
        return text
    text += f"  {row['peer']}: {_seconds(row['peer_value'])}"
    if row["ratio"] is not None:
        text += f"  ratio {row['ratio']:.3g}"
    verdict = {True: "met", False: "MISSED", None: f"not measured: {row.get('why', '')}"}
    return f"{text}  ({row['target']}: {verdict[row['met']]})"


def _seconds(value: float | None) -> str:
    return "      -  " if value is None else f"{value:7.2f} s"
