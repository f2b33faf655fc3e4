"""What `everstep check` says of saving and keeping, in words."""

from orchestrator.config_keep import KeepSection
from orchestrator.config_sections import CheckpointSection
from orchestrator.views.units import count, seconds, speed

WHEN_BUSY = {
    "skip": "is skipped",
    "wait": "waits up to {wait} for it",
    "replace": "takes the place of one that nobody began to send",
}


def saving_words(checkpoint: CheckpointSection) -> str:
    """Say how often a run saves, and what happens when the store is too slow."""
    if checkpoint.store is None:
        return "nothing"
    every = f"every {count(checkpoint.interval_steps, 'step')} at first"
    tuned = ", then as measured" if checkpoint.tune else ", always"
    busy = WHEN_BUSY[checkpoint.stage_policy].format(wait=seconds(checkpoint.stage_wait))
    most = checkpoint.max_bytes_per_s
    line = f"a node sends at most {speed(most)}" if most else "a node sends as fast as it can"
    other = {
        "refuse": "the own state of ranks is for as many ranks only",
        "fresh": "the own state of ranks begins afresh with another number of them",
    }[checkpoint.on_other_world]
    return f"{every}{tuned}; a save that finds uploads running {busy}; {line}; {other}"


def keeping_words(checkpoint: CheckpointSection) -> str:
    """Say which checkpoints are deleted."""
    if checkpoint.store is None:
        return "nothing"
    keep = checkpoint.keep
    if keep is None:
        return "all: nothing is deleted without a table [checkpoint.keep]"
    return "; ".join([*_rules(keep), "the two newest in any case; all else is deleted"])


def _rules(keep: KeepSection) -> list[str]:
    policy = keep.policy()
    rules = []
    if policy.keep_last:
        rules.append(f"the last {policy.keep_last:,}")
    if policy.every_steps:
        rules.append(f"the first of every {policy.every_steps:,} steps")
    if policy.ages_s:
        factor = policy.ages_factor
        rules.append(f"two for each age of {seconds(policy.ages_s)}, {factor} times that, ...")
    of = f"the first of {{}} for averages, the last {policy.average_last:,} of them"
    if policy.average_every_steps:
        rules.append(of.format(f"every {policy.average_every_steps:,} steps"))
    if policy.average_every_tokens:
        rules.append(of.format(f"every {policy.average_every_tokens:,} tokens"))
    rules.append(f"those in quarantine for {seconds(policy.quarantined_s)}")
    return rules
