"""What a person asked for: a planned stop, a snapshot now."""

import math

from orchestrator.core.actions import Decision, Finish, Outcome, Snapshot, StopRanks
from orchestrator.core.events import Ending
from orchestrator.core.policy import Policy
from orchestrator.core.restore import unsent
from orchestrator.core.rules.verdicts import make, wait
from orchestrator.core.state import Attempt, AttemptPhase, State

MARGIN_S = 1.0


def stop(state: State, now: float, policy: Policy) -> Decision | None:
    """Stop for good: let the ranks save and leave, wait for the upload, then finish."""
    wanted = stop_wanted(state)
    if wanted is None:
        return None
    who, seq = wanted
    evidence = (seq,)
    attempt = state.attempt
    if attempt is not None and attempt.is_live:
        if attempt.phase is AttemptPhase.STOPPING:
            return wait(state, "operator.stop", "waiting for the ranks to stop")
        action = StopRanks(attempt=attempt.number, nodes=attempt.manned, planned=True)
        reason = f"{who}: save, then leave"
        return make(state, "operator.stop", action, reason, evidence, attempt.stop_orders + 1)
    if attempt is not None and not upload_settled(state, now, policy):
        return wait(state, "operator.stop", "waiting for the last checkpoint's upload")
    reason = who
    if state.commits:
        reason += f"; the newest checkpoint is step {state.commits[0][0]}"
    action_finish = Finish(outcome=Outcome.STOPPED)
    return make(state, "operator.stop", action_finish, reason, evidence, 1)


def stop_wanted(state: State) -> tuple[str, int] | None:
    """Say who wants the run to stop for good, and by which record; None when nobody does."""
    if state.stop_requested_seq:
        return "the operator asked to stop", state.stop_requested_seq
    for a in state.allocations:
        is_run = a.had_nodes or len(state.allocations) == 1  # a further request is not the run
        if a.ending is Ending.CANCELLED and is_run and not a.given_back:
            return f"allocation {a.job} was cancelled by a person", a.seq
    return None


def upload_settled(state: State, now: float, policy: Policy) -> bool:
    """Whether nothing newer than its newest commit is still on its way to the store.

    Only what the last attempt saved, or started from, counts: other attempts may have left commits
    at later steps that turned out bad. Nor does a checkpoint that some rank neither holds nor has
    sent: it never gets whole.
    """
    attempt = state.attempt
    if attempt is None or attempt.over_at is None or not state.run or not state.run.checkpoints:
        return True
    if state.waited_s(attempt.over_at, now) > policy.final_upload_s:
        return True
    held = unsent(state, attempt.nodes)
    coming = {
        key
        for key in {*held, *state.uploads}
        if len(held.get(key, set()) | state.uploads.get(key, {}).keys()) == attempt.world
    }
    return _newest(attempt, coming) <= _newest(attempt, {*state.commits, *state.refused})


def _newest(attempt: Attempt, checkpoints: set[tuple[int, int]]) -> int:
    start = attempt.restore
    own = {c for c in checkpoints if c[1] == attempt.number}
    if start is not None:
        own |= checkpoints & {(start.step, start.attempt)}
    return max((step for step, _ in own), default=-1)


def snapshot(state: State, now: float, policy: Policy) -> Decision | None:
    """Save once, at a step that all ranks still have before them."""
    attempt = state.attempt
    if state.snapshot_requested_seq <= state.snapshots_done_seq:
        return None
    if attempt is None or attempt.phase is not AttemptPhase.RUNNING:
        return None
    if attempt.first_step_at is None:
        return None
    step = attempt.max_step + steps_ahead(state)
    reason = f"the operator asked for a snapshot: all ranks save at step {step} or soon after"
    evidence = (state.snapshot_requested_seq,)
    action = Snapshot(attempt=attempt.number, step=step)
    return make(state, "operator.snapshot", action, reason, evidence, evidence[0])


def steps_ahead(state: State) -> int:
    """Return how many steps ahead an order must point for every rank to hear of it in time."""
    step_s = state.measured.step_s
    return 2 if not step_s or step_s <= 0 else max(2, math.ceil(MARGIN_S / step_s))
