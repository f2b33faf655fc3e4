"""`decide(state, now, policy) -> tuple[Decision, ...]`: the rules in order, first match wins."""

from collections.abc import Callable

from orchestrator.core.actions import Decision, Wait
from orchestrator.core.policy import Policy
from orchestrator.core.rules import (
    allocation,
    attempt_over,
    attempt_trouble,
    commit,
    disks,
    finish,
    interval,
    launch,
    ledger,
    move,
    operator,
    pair,
    quarantine,
    restart,
    retention,
    start,
)
from orchestrator.core.state import State

Rule = Callable[[State, float, Policy], Decision | None]

RULES: tuple[Rule, ...] = (
    commit.commit,  # first: whatever else is wrong, what was saved is made to count
    attempt_trouble.stop_again,
    operator.stop,
    attempt_trouble.stop_after_trouble,
    attempt_trouble.stop_after_slow_start,
    finish.finished,
    ledger.note,  # before the run goes on, or ends, over the incident
    quarantine.quarantine,
    attempt_over.user_error,
    attempt_over.storage_error,
    attempt_over.no_progress,
    attempt_over.budget_spent,
    attempt_over.history_unusable,
    launch.launch,
    launch.allocation_refused,
    launch.allocation_lost,
    restart.restart,
    start.start,
    move.move,
    launch.replace,
    allocation.unhold,
    allocation.give_back,
    launch.no_capacity,
    disks.disks,
    operator.snapshot,
    pair.pair,
    interval.interval,
    retention.prune,  # last: nothing waits for it
)


def decide(state: State, now: float, policy: Policy) -> tuple[Decision, ...]:
    """Return the next decision, or nothing.

    The caller journals it, folds it and asks again until nothing is left, so each decision sees
    the effect of the ones before it. A `Wait` with an unchanged reason is not repeated.
    """
    if state.run is None or state.over or state.outcome is not None:
        return ()
    for rule in RULES:
        decision = rule(state, now, policy)
        if decision is None:
            continue
        if isinstance(decision.action, Wait) and decision.reason == state.waiting_for:
            return ()
        return (decision,)
    return ()
