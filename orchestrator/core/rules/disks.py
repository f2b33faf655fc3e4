"""Nodes are there, but what the run could go on from is on the disks of others."""

from orchestrator.core import disks as shelves
from orchestrator.core.actions import Decision
from orchestrator.core.policy import Policy
from orchestrator.core.restore import has_history
from orchestrator.core.rules.restart import next_attempt
from orchestrator.core.rules.verdicts import ended_badly, wait
from orchestrator.core.state import State


def disks(state: State, now: float, policy: Policy) -> Decision | None:
    """Wait for them; once they had their time to come the run ends (`history_unusable`)."""
    ended = ended_badly(state)
    if ended is None or not has_history(state) or not shelves.are_awaited(state, now, policy):
        return None
    plan = next_attempt(state, ended[1], now)
    if plan is None or plan.restore is not None:
        return None
    return wait(state, "disks", f"waiting for {shelves.whereabouts(state)}")
