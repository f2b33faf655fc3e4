"""How many incidents of a class a run may have before a person must look.

An incident is forgiven once a checkpoint beyond the furthest step before it was committed, so a
long run that keeps moving is never stopped by its age.
"""

from orchestrator.core.state import Incident, State


def spent(state: State, fault_class: str, now: float) -> tuple[Incident, ...]:
    """Return the unforgiven incidents of a class inside the window, oldest first."""
    since = now - state.policy.budget_window_s
    return tuple(
        i
        for i in state.incidents
        if i.fault_class == fault_class and not i.forgiven and i.detected_at >= since
    )


def same_root_streak(state: State) -> int:
    """Count the last incidents in a row with one root and no new step among them.

    The root is the fault, and its text up to the first digit: step numbers, addresses and pids
    differ between repetitions of one fault. A lost node is never the same root as another one.
    """
    if not state.incidents:
        return 0
    last = state.incidents[-1]
    streak = 0
    for incident in reversed(state.incidents):
        if _root(incident) != _root(last) or incident.best_step != last.best_step:
            break
        streak += 1
    return streak


def strikes(state: State, node: str, now: float) -> tuple[Incident, ...]:
    """Return the incidents inside the window that are blamed on `node`."""
    since = now - state.policy.budget_window_s
    return tuple(i for i in state.incidents if i.node == node and i.detected_at >= since)


def _root(incident: Incident) -> tuple[str, str | None, str]:
    text = incident.cause
    first_digit = next((k for k, c in enumerate(text) if c.isdigit()), len(text))
    node = incident.node if incident.fault_class == "node" else None
    return incident.fault, node, text[:first_digit]
