"""The table and the JSON: what was measured beside what, with the targets."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REPORTED = "reported only"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure, its peer, and what their ratio must reach.

    Attributes:
        figure: What is measured.
        peer: What it is compared with; "" for nothing.
        limit: Bound of ours / peer's; None for a figure that is only reported.
        unit: Of both.
        at_most: Whether the bound is an upper one.
    """

    figure: str
    peer: str = ""
    limit: float | None = None
    unit: str = "s"
    at_most: bool = True

    @property
    def text(self) -> str | None:
        """The bound for a person."""
        if self.limit is None:
            return None
        return f"ratio {'<=' if self.at_most else '>='} {self.limit:g}"


def compared(
    target: Target, values: Sequence[float], peers: Sequence[float], why: str = "", **more: Any
) -> Row:
    """Return a comparison of medians.

    Args:
        target: What it must reach.
        values: Ours.
        peers: The peer's, in the same order.
        why: What a reader has to know of it.
        **more: Further fields of the row.
    """
    value = statistics.median(values) if values else None
    peer = statistics.median(peers) if peers else None
    ratio = value / peer if value is not None and peer else None
    met = None
    if ratio is not None and target.limit is not None:
        met = ratio <= target.limit if target.at_most else ratio >= target.limit
    if met is None and not why:
        why = REPORTED if target.limit is None else "not measured"
    return {
        "figure": target.figure,
        "value": value,
        "unit": target.unit,
        "peer": target.peer or None,
        "peer_value": peer,
        "ratio": ratio,
        "target": target.text,
        "met": met,
        "why": why,
        "all": [_short(x) for x in values],
        "peer_all": [_short(x) for x in peers],
        "ratio_all": _in_pairs(values, peers),
        "load": round(os.getloadavg()[0], 1),
        **more,
    }


def missing(target: Target, why: str) -> Row:
    """Return the row of a figure that could not be measured."""
    return compared(target, (), (), why)


def line(row: Row) -> str:
    """Render a row for a person."""
    text = f"{row['figure']:<58} {_number(row['value'], row['unit'])}"
    if row["peer"]:
        text += f"  {row['peer']}: {_number(row['peer_value'], row['unit'])}"
    if row["ratio"] is not None:
        text += f"  ratio {row['ratio']:.3g}"
    if row["target"]:
        verdict = {True: "met", False: "MISSED", None: "not measured"}[row["met"]]
        text += f"  ({row['target']}: {verdict})"
    return text + (f"  [{row['why']}]" if row["why"] else "")


def _number(value: float | None, unit: str) -> str:
    return f"{'-':>9} {unit}" if value is None else f"{value:9.4g} {unit}"


def _in_pairs(values: Sequence[float], peers: Sequence[float]) -> list[float]:
    """Return the ratio of each turn, which a load on the machine that changes disturbs less."""
    if len(values) != len(peers):
        return []
    return [_short(value / peer) for value, peer in zip(values, peers, strict=True) if peer]


def _short(value: float) -> float:
    return float(f"{value:.5g}")
