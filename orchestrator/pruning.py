"""What `everstep checkpoints prune` finds, and deletes when it is told to."""

import time
from typing import Any

from checkpointing import keys
from checkpointing.deletion import delete_commit, finish_deletions
from checkpointing.resolver import CommitInfo, list_commits, read_catalogue
from checkpointing.retention import Candidate, RetentionPolicy, Verdict, plan_retention
from checkpointing.sweep import SweepPlan, find_orphans, sweep
from orchestrator.catalogue import Target, in_use, told


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
    with told():
        sound = {commit.place for commit in list_commits(target.store, target.run)}
        catalogue = read_catalogue(target.store, target.run)
        commits = [c for c in catalogue.commits if c.place in sound]
        candidates = [_candidate(c, tokens_per_step, quarantined=False) for c in commits]
        candidates += [
            _candidate(c, tokens_per_step, quarantined=True) for c in catalogue.quarantined
        ]
        left = sorted(
            keys.place_of_deletion(info.key) or (0, 0)
            for info in target.store.list(keys.deleting_prefix(target.run))
        )
        swept = SweepPlan(orphans=(), uploads=())
        if orphans_older_than_s is not None:
            swept = find_orphans(
                target.store, target.run, now, older_than_s=orphans_older_than_s, in_use=used
            )
    decided = plan_retention(candidates, now, policy, used)
    body = {
        **target.about,
        "keep": [_verdict(verdict) for verdict in decided.keep],
        "delete": [_verdict(verdict) for verdict in decided.delete],
        "unfinished": [list(place) for place in left],
        "orphans": [
            {
                "step": orphan.place[0],
                "attempt": orphan.place[1],
                "objects": len(orphan.objects),
                "nbytes": orphan.nbytes,
                "why": orphan.why,
            }
            for orphan in swept.orphans
        ],
        "uploads": [
            {"key": upload.key, "age_s": now - upload.started_at} for upload in swept.uploads
        ],
        "deleted": False,
        "freed_bytes": 0,
    }
    return body, swept


def carry_out(target: Target, body: dict[str, Any], swept: SweepPlan) -> dict[str, Any]:
    """Delete what a plan says, oldest first; doing it again after a kill finishes it."""
    freed = 0
    with told():
        finish_deletions(target.store, target.run)
        for verdict in reversed(body["delete"]):
            freed += delete_commit(target.store, target.run, verdict["step"], verdict["attempt"])
        freed += sweep(target.store, target.run, swept)
    return {**body, "deleted": True, "freed_bytes": freed}


def _candidate(commit: CommitInfo, tokens_per_step: int, *, quarantined: bool) -> Candidate:
    return Candidate(
        step=commit.step,
        attempt=commit.attempt,
        committed_at=commit.committed_at,
        tokens=commit.step * tokens_per_step if tokens_per_step else None,
        quarantined=quarantined,
    )


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"step": verdict.place[0], "attempt": verdict.place[1], "why": verdict.why}
