"""Ends of an attempt that a restart does not cure: the run stops and says why."""

from orchestrator.core import budgets, disks
from orchestrator.core.actions import Decision
from orchestrator.core.policy import Policy
from orchestrator.core.restore import has_history
from orchestrator.core.rules.restart import next_attempt
from orchestrator.core.rules.verdicts import ended_badly, fail
from orchestrator.core.state import State


def user_error(state: State, now: float, policy: Policy) -> Decision | None:
    """The same error on all ranks before the first step will come again at every start."""
    ended = ended_badly(state)
    if ended is None or ended[1].fault_class != "user":
        return None
    attempt, incident = ended
    reason = f"not restarted, it would fail again: {incident.cause}"
    return fail(state, "user_error", reason, (*incident.evidence, attempt.verdict_seq))


def storage_error(state: State, now: float, policy: Policy) -> Decision | None:
    """A full disk or a refused key is not cured by a restart before the first step."""
    ended = ended_badly(state)
    if ended is None or ended[1].fault != "storage":
        return None  # a failed restore is of the same class, and the next older one may do
    attempt, incident = ended
    if attempt.first_step_at is not None:
        return None
    reason = f"not restarted, storage must be put right first: {incident.cause}"
    return fail(state, "storage_error", reason, (*incident.evidence, attempt.verdict_seq))


def no_progress(state: State, now: float, policy: Policy) -> Decision | None:
    """The same root again and again, and no new step in between."""
    ended = ended_badly(state)
    if ended is None or ended[1].fault_class == "free":
        return None
    attempt, incident = ended
    streak = budgets.same_root_streak(state)
    if streak < policy.same_root_limit:
        return None
    reason = (
        f"{streak} times the same fault without a new step "
        f"(stuck at step {incident.best_step}): {incident.cause}"
    )
    return fail(state, "no_progress", reason, (*incident.evidence, attempt.verdict_seq))


def budget_spent(state: State, now: float, policy: Policy) -> Decision | None:
    """More incidents of one class than the budget allows, none of them forgiven."""
    ended = ended_badly(state)
    if ended is None:
        return None
    attempt, incident = ended
    limit = policy.budget.get(incident.fault_class)
    spent = budgets.spent(state, incident.fault_class, now)
    if limit is None or len(spent) <= limit:
        return None
    reason = (
        f"budget for {incident.fault_class} faults is spent: {len(spent)} without a newer "
        f"checkpoint in {policy.budget_window_s / 3600:g} h, {limit} allowed; "
        f"the last: {incident.cause}"
    )
    return fail(state, "budget_spent", reason, (*incident.evidence, attempt.verdict_seq))


def history_unusable(state: State, now: float, policy: Policy) -> Decision | None:
    """Every checkpoint failed to restore: never start over from step 0 unasked."""
    ended = ended_badly(state)
    if ended is None or not has_history(state):
        return None
    attempt, incident = ended
    plan = next_attempt(state, incident, now)
    if plan is None or plan.restore is not None or disks.are_awaited(state, now, policy):
        return None
    reason = disks.unusable(state)
    return fail(state, "history_unusable", reason, (*incident.evidence, attempt.verdict_seq))
