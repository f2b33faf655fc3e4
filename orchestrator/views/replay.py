"""Derives every decision of a journal again and reports where it comes out differently."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from orchestrator.core.actions import Decision
from orchestrator.core.codec import encode
from orchestrator.core.decide import decide
from orchestrator.core.events import DecisionMade
from orchestrator.core.fold import fold
from orchestrator.core.record import Record
from orchestrator.core.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A stored decision and what these rules make of the same state.

    Attributes:
        seq: Journal number of the stored decision.
        stored: The decision in the journal.
        derived: The decision made now; None when nothing would be decided.
        fields: Names of what differs, e.g. `reason`.
    """

    seq: int
    at: float
    stored: Decision
    derived: Decision | None
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result: how many decisions were derived again, and the differences."""

    records: int
    decisions: int
    differences: tuple[Difference, ...]


def replay(records: Sequence[Record]) -> Replayed:
    """Derive each decision from the state before it, at its own time, under its own policy."""
    state, made, differences = State(), 0, []
    for record in records:
        if isinstance(record.event, DecisionMade):
            made += 1
            difference = _compare(state, record, record.event.decision)
            if difference is not None:
                differences.append(difference)
        state = fold(state, record)
    return Replayed(records=len(records), decisions=made, differences=tuple(differences))


def as_json(replayed: Replayed) -> dict[str, Any]:
    """Return the result as a JSON object."""
    return {
        "records": replayed.records,
        "decisions": replayed.decisions,
        "differences": [
            {
                **asdict(d),
                "stored": encode(d.stored),
                "derived": encode(d.derived) if d.derived else None,
            }
            for d in replayed.differences
        ],
    }


def _compare(state: State, record: Record, stored: Decision) -> Difference | None:
    derived = next(iter(decide(state, record.at, state.policy)), None)
    if derived == stored:
        return None
    names = [f.name for f in fields(Decision)]
    differing = [n for n in names if getattr(derived, n, None) != getattr(stored, n)]
    return Difference(
        seq=record.seq,
        at=record.at,
        stored=stored,
        derived=derived,
        fields=tuple(differing) if derived else ("everything",),
    )
