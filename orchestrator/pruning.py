"""What `everstep checkpoints prune` finds, and deletes when it is told to."""

import time
from dataclasses import replace
from typing import Any

from checkpointing import keys
from checkpointing.pruning import delete_all, plan_for
from checkpointing.resolver import CommitInfo
from checkpointing.retention import RetentionPolicy, Verdict
from checkpointing.sweep import Orphan, SweepPlan, find_orphans, sweep
from orchestrator.catalogue import Target, in_use, told
from orchestrator.errors import ConfigError


def rules(target: Target, **given: float | None) -> RetentionPolicy:
    """Return the run's own rules, or the defaults, but for what is given.

    Raises:
        ConfigError: What is given is none of a rule.
    """
    said = {name: value for name, value in given.items() if value is not None}
    try:
        return replace(target.kept or RetentionPolicy(), **said)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(str(error)) from error


def plan(
    target: Target,
    policy: RetentionPolicy,
    *,
    tokens_per_step: int,
    orphans_older_than_s: float | None,
) -> tuple[dict[str, Any], SweepPlan]:
    """Decide what to delete; changes nothing."""
    used = in_use(target)
    now = time.time()

    def by_steps(commit: CommitInfo) -> int:
        return commit.step * tokens_per_step

    told_tokens = by_steps if tokens_per_step else None
    with told():
        decided = plan_for(
            target.store, target.run, policy, tokens_of=told_tokens, in_use=used, now=now
        )
        left = sorted(
            keys.place_of_deletion(info.key) or (0, 0)
            for info in target.store.list(keys.deleting_prefix(target.run))
        )
        swept = SweepPlan(orphans=(), uploads=())
        if orphans_older_than_s is not None:
            swept = find_orphans(
                target.store, target.run, now, older_than_s=orphans_older_than_s, in_use=used
            )
    body = {
        **target.about,
        "keep": [_verdict(verdict) for verdict in decided.keep],
        "delete": [_verdict(verdict) for verdict in decided.delete],
        "unfinished": [list(place) for place in left],
        "orphans": [_orphan(orphan) for orphan in swept.orphans],
        "uploads": [{"key": one.key, "age_s": now - one.started_at} for one in swept.uploads],
        "deleted": False,
        "freed_bytes": 0,
    }
    return body, swept


def carry_out(target: Target, body: dict[str, Any], swept: SweepPlan) -> dict[str, Any]:
    """Delete what a plan says, oldest first; doing it again after a kill finishes it."""
    with told():
        places = [(verdict["step"], verdict["attempt"]) for verdict in reversed(body["delete"])]
        _, freed = delete_all(target.store, target.run, places)
        freed += sweep(target.store, target.run, swept)
    return {**body, "deleted": True, "freed_bytes": freed}


def _orphan(orphan: Orphan) -> dict[str, Any]:
    return {
        "step": orphan.place[0],
        "attempt": orphan.place[1],
        "objects": len(orphan.objects),
        "nbytes": orphan.nbytes,
        "why": orphan.why,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"step": verdict.place[0], "attempt": verdict.place[1], "why": verdict.why}
