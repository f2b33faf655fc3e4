"""The table of interruptions: cause, decision and reason, seconds by phase, steps lost."""

from dataclasses import asdict
from typing import Any

from orchestrator.core.state import Incident, State
from orchestrator.views.goodput import phases, steps_lost
from orchestrator.views.units import NOT_MEASURED, seconds

PHASES: tuple[tuple[str, str], ...] = (
    ("detect_s", "detect"),
    ("stop_s", "stop"),
    ("start_s", "start"),
    ("restore_s", "restore"),
    ("first_step_s", "first step"),
    ("total_s", "total"),
)

RULE_WORDS = {
    "restart_in_place": "restart in place",
    "spare_takes_over": "spare takes over",
    "shrink": "smaller world",
    "grow": "larger world",
}


def incident_rows(state: State) -> list[dict[str, Any]]:
    """Return one JSON object per incident, oldest first."""
    rows = [_row(incident) for incident in state.incidents]
    if rows and state.outcome is not None and not state.incidents[-1].rule:
        rows[-1] |= {"decision": "the run ended", "reason": state.outcome_reason}
    return rows


def _row(incident: Incident) -> dict[str, Any]:
    restore = incident.restore
    return {
        "number": incident.number,
        "attempt": incident.attempt,
        "at": incident.fault_at,
        "fault": incident.fault,
        "class": incident.fault_class,
        "node": incident.node,
        "rank": incident.rank,
        "cause": incident.cause,
        "decision": decision_words(incident),
        "rule": incident.rule,
        "reason": incident.decision,
        "next_attempt": incident.next_attempt,
        "restore": None
        if restore is None
        else {"step": restore.step, "attempt": restore.attempt, "source": restore.source.value},
        "step": incident.step,
        "resumed_step": incident.resumed_step,
        "steps_lost": steps_lost(incident),
        "evidence": list(incident.evidence),
        "phases": asdict(phases(incident)),
        "open": incident.first_step_at is None,
    }


def decision_words(incident: Incident) -> str:
    """Name what was decided in a few words."""
    if not incident.rule:
        return "not decided yet"
    return RULE_WORDS.get(incident.rule, incident.rule.replace("_", " "))


def phase_cells(row: dict[str, Any]) -> list[str]:
    """Render the phases of a row, in the order of `PHASES`."""
    return [seconds(row["phases"][name]) for name, _ in PHASES]


def lost_cell(row: dict[str, Any]) -> str:
    """Render the steps lost of a row."""
    return NOT_MEASURED if row["steps_lost"] is None else f"{row['steps_lost']:,}"
