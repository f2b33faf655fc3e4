"""Where a run stands, as one JSON object: for `--json`, the status page and the terminal."""

import math
from collections.abc import Sequence
from typing import Any

from orchestrator.core import budgets
from orchestrator.core.events import DISK, PEER
from orchestrator.core.node import Allocation, Node
from orchestrator.core.state import Attempt, RunPhase, State
from orchestrator.views.events import describe, kind_of
from orchestrator.views.folders import folders_json
from orchestrator.views.goodput import account
from orchestrator.views.history import History
from orchestrator.views.incidents import incident_rows
from orchestrator.views.saves import cost_json, saving
from orchestrator.views.units import count, plain

CURVE_POINTS = 160
EVENTS = 40
ALLOCATIONS = 8

PHASE_WORDS: dict[RunPhase, str] = {
    RunPhase.REQUESTED: "the run was asked for, nothing is started yet",
    RunPhase.ALLOCATING: "waiting for nodes",
    RunPhase.STARTING: "the ranks are starting",
    RunPhase.RUNNING: "training",
    RunPhase.STOPPING: "the ranks are being stopped",
    RunPhase.RECOVERING: "recovering from an incident",
    RunPhase.FINISHING: "ending the run",
    RunPhase.OVER: "the run is over",
}


def status(
    state: State,
    history: History,
    now: float,
    supervisor: dict[str, Any] | None = None,
    earlier: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return everything that a person asks first.

    Args:
        state: The state of the run.
        history: Its past.
        now: Unix seconds.
        supervisor: What is known of it from elsewhere: `url`, `alive` (None: not asked).
        earlier: What came before the state's journal, from `orchestrator.views.parts`.
    """
    return {
        "run": state.run.run if state.run else None,
        "phase": state.phase.value,
        "headline": headline(state),
        "at": now,
        "seq": state.seq,
        "since": state.requested_at,
        "earlier": list(earlier),
        "outcome": state.outcome.value if state.outcome else None,
        "outcome_reason": state.outcome_reason or None,
        "waiting_for": state.waiting_for or None,
        "supervisor": {
            "holder": history.holder or None,
            "epoch": state.epoch,
            **(supervisor or {}),
        },
        "allocations": [_allocation(a, state.over) for a in state.allocations[-ALLOCATIONS:]],
        "attempt": _attempt(state.attempt),
        "progress": _progress(state, history, now),
        "nodes": [_node(state, node) for node in state.nodes.values()],
        "checkpoints": _checkpoints(state, history, now),
        "folders": folders_json(state.folders, now) if state.policy.watches else None,
        "incidents": incident_rows(state),
        "budget": _budget(state, now),
        "breaker_open": state.excluded_lately >= state.policy.exclusion_limit,
        "goodput": _goodput(state, history, now),
        "curve": _curve(history),
        "events": [
            {"seq": r.seq, "at": r.at, "kind": kind_of(r.event), "text": describe(r.event)}
            for r in list(history.notable)[-EVENTS:]
        ],
    }


def headline(state: State) -> str:
    """Say in one line what the run is doing, or what it waits for."""
    if state.outcome is not None:
        return f"{state.outcome.value}: {state.outcome_reason}"
    if state.waiting_for:
        return state.waiting_for
    words = PHASE_WORDS[state.phase]
    if state.phase is RunPhase.RECOVERING and state.incidents:
        return f"{words}: {state.incidents[-1].cause}"
    attempt = state.attempt
    if state.phase is RunPhase.RUNNING and attempt is not None:
        few = " and ".join(attempt.nodes)
        where = few if len(attempt.nodes) <= 2 else count(len(attempt.nodes), "node")
        return f"{words}: attempt {attempt.number} on {where}"
    return words


def _attempt(attempt: Attempt | None) -> dict[str, Any] | None:
    if attempt is None:
        return None
    restore = attempt.restore
    return {
        "number": attempt.number,
        "phase": attempt.phase.value,
        "nodes": list(attempt.nodes),
        "ranks_per_node": attempt.ranks_per_node,
        "world": attempt.world,
        "ordered_at": attempt.ordered_at,
        "first_step_at": attempt.first_step_at,
        "restore": {"step": restore.step, "source": restore.source.value} if restore else None,
    }


def _allocation(allocation: Allocation, over: bool) -> dict[str, Any]:
    return {
        "job": allocation.job or None,
        "state": "over" if over else allocation.phase.value,
        "nodes": allocation.nodes,
        "why": allocation.why or None,
        "ending": allocation.ending.value if allocation.ending else None,
        "asked_at": allocation.asked_at,
    }


def _progress(state: State, history: History, now: float) -> dict[str, Any]:
    last_at = history.last_step_at()
    step = state.attempt.min_step if state.attempt else -1
    return {
        "step": step if step >= 0 else None,
        "best_step": state.best_step if state.best_step >= 0 else None,
        "loss": plain(state.loss),
        "step_s": state.measured.step_s,
        "tokens": state.tokens or None,
        "tokens_per_s": history.tokens_per_s(),
        "last_step_age_s": None if last_at is None else max(0.0, now - last_at),
    }


def _node(state: State, node: Node) -> dict[str, Any]:
    attempt = state.attempt
    ranks: list[int] = []
    if attempt is not None and attempt.is_live and node.name in attempt.nodes:
        first = attempt.nodes.index(node.name) * attempt.ranks_per_node
        ranks = list(range(first, first + attempt.ranks_per_node))
    if not node.alive:
        word = "lost"
    elif node.excluded:
        word = "excluded"
    elif not ranks and node.unfit:
        word = "unfit"
    elif not ranks and not node.is_good:
        word = "leaving"
    elif state.over:
        word = "released"
    else:
        word = "training" if ranks else "spare"
    warned = f"its allocation ends (SIG{node.warned})" if node.warned else ""
    warned = "given back" if node.given_back else warned
    why = node.lost_why if not node.alive else node.complaint or warned
    return {
        "name": node.name,
        "state": word,
        "why": why,
        "ranks": ranks,
        "in_memory": sorted({shard.step for shard in node.staged}),
        "kept_for_others": sorted({c.step for c in node.replicas if c.tier == PEER}),
        "on_disk": sorted({c.step for c in node.replicas if c.tier == DISK}),
    }


def _checkpoints(state: State, history: History, now: float) -> dict[str, Any]:
    newest = state.commits[0] if state.commits else None
    made = next((c for c in reversed(history.commits) if (c.step, c.attempt) == newest), None)
    staged = [shard.step for node in state.nodes.values() for shard in node.staged]
    measured = state.measured
    return {
        "enabled": bool(state.run and state.run.checkpoints),
        "newest_step": newest[0] if newest else None,
        "newest_attempt": newest[1] if newest else None,
        "age_s": max(0.0, now - made.at) if made else None,
        "nbytes": made.nbytes if made else None,
        "committed": len(state.commits),
        "in_memory_step": max(staged, default=None),
        "uploading_step": max((step for step, _ in state.uploads), default=None),
        "interval_steps": state.interval_steps,
        "interval_why": history.interval.reason if history.interval else "as the run asked for",
        "stall_s": measured.stall_s[-1] if measured.stall_s else None,
        "upload_s": measured.upload_s[-1] if measured.upload_s else None,
        "skipped_saves": state.skipped_saves,
        "dropped_saves": state.dropped_saves,
        "saving": saving(state),
        "last_save": cost_json(state.last_save),
        "retries": dict(history.sums.retries),
        "refused": len(state.refused),
        "quarantined": [list(place) for place in sorted(state.in_quarantine, reverse=True)],
        "deleted": state.deleted,
        "copies_failing": _copies_failing(state),
        "problem": state.refused_why
        or state.last_upload_error
        or state.catalogue_problem
        or state.retention_problem
        or None,
    }


def _copies_failing(state: State) -> str | None:
    """Say of one living node why its snapshots are not copied, and of how many others."""
    failing = [n for n in state.nodes.values() if n.alive and n.copy_problem]
    if not failing:
        return None
    more = f" (and from {count(len(failing) - 1, 'more node')})" if len(failing) > 1 else ""
    return f"from {failing[0].name} {failing[0].copy_problem}{more}"


def _budget(state: State, now: float) -> list[dict[str, Any]]:
    rows = []
    for name, allowed in sorted(state.policy.budget.items()):
        used = len(budgets.spent(state, name, now))
        forgiven = sum(i.fault_class == name and i.forgiven for i in state.incidents)
        left = max(0, allowed - used)
        row = {"class": name, "allowed": allowed, "spent": used, "left": left}
        rows.append({**row, "forgiven": forgiven})
    return rows


def _goodput(state: State, history: History, now: float) -> dict[str, Any]:
    account_ = account(state, history, now)
    return {
        "ratio": account_.ratio,
        "wall_s": account_.wall_s,
        "seconds": {use.value: s for use, s in account_.seconds.items()},
        "supervisor_away_s": account_.away_s,
    }


def _curve(history: History) -> list[list[float]]:
    """Return (step, loss) of the run so far, each step once, thinned."""
    best: dict[int, float] = {}
    for number in sorted(history.points):
        for point in history.points[number]:
            if math.isfinite(point.loss):
                best[point.step] = point.loss
    points = [[step, best[step]] for step in sorted(best)]
    every = max(1, math.ceil(len(points) / CURVE_POINTS))
    return points[::-every][::-1]
