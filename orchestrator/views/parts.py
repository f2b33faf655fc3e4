"""The journals that a run has put aside: each start after a stop or an end begins a new one."""

from collections.abc import Sequence
from typing import Any

from orchestrator.core.fold import fold
from orchestrator.core.record import Record
from orchestrator.core.state import State
from orchestrator.views.units import clock, count


def part(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """Tell of a journal that was put aside what it covers."""
    state = State()
    for record in records:
        state = fold(state, record)
    return {
        "journal": name,
        "since": records[0].at if records else None,
        "until": state.at if records else None,
        "outcome": state.outcome.value if state.outcome else None,
        "best_step": state.best_step if state.best_step >= 0 else None,
        "incidents": len(state.incidents),
    }


def covers_words(body: dict[str, Any]) -> str:
    """Say which part of the run a status or report is about, "" when that is all of it."""
    earlier = body.get("earlier")
    if not earlier:
        return ""
    last = earlier[-1]
    reached = f" at step {last['best_step']:,}" if last["best_step"] is not None else ""
    found = sum(part["incidents"] for part in earlier)
    return (
        f"only what came since the start at {clock(body['since'])}; before that it was "
        f"{last['outcome'] or 'ended'}{reached}, with {count(found, 'incident')}, "
        f"in {', '.join(part['journal'] for part in earlier)}"
    )
