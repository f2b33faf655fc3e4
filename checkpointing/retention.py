"""Which checkpoints are kept. Pure: commits and a time in, what to delete and why out.

Every rule keeps the first commit of a slot: of so many steps, of so many tokens, or of a span of
time that is a power of a factor. What such a rule keeps now it has kept all along, since the first
one of a slot stays the first one; so deleting today never takes what a rule wants tomorrow.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

Place = tuple[int, int]
_LEVELS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A committed checkpoint, as far as retention needs to know it.

    Attributes:
        step: Finished steps.
        attempt: Attempt that staged it.
        committed_at: Unix seconds; None when not known: then ages say nothing of it.
        tokens: Tokens trained until then; None when not known.
        quarantined: It failed to restore once.
    """

    step: int
    attempt: int
    committed_at: float | None = None
    tokens: int | None = None
    quarantined: bool = False

    @property
    def place(self) -> Place:
        """Step and attempt, by which commits are ordered."""
        return self.step, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """What to keep. A rule with 0 is off. Whatever it says, the two newest usable ones are kept.

    Attributes:
        keep_last: The newest so many.
        every_steps: The first one of each so many steps, for ever.
        ages_s: Geometric ages: the first one of the last two spans of `ages_s` seconds, of the last
            two of `ages_factor` times as many, and so on. Corrupt training is noticed late, and
            this leaves something from before at any distance for few checkpoints.
        ages_factor: See there; at least 2.
        average_last: So many for an average ...
        average_every_steps: ... each the first one of so many steps,
        average_every_tokens: and of so many tokens; one whose tokens are not known is kept.
        quarantined_s: One in quarantine is kept for so long, for those who look into it.
    """

    keep_last: int = 3
    every_steps: int = 0
    ages_s: float = 3600.0
    ages_factor: int = 2
    average_last: int = 6
    average_every_steps: int = 0
    average_every_tokens: int = 0
    quarantined_s: float = 7 * 86400.0

    def __post_init__(self) -> None:
        counts = (
            self.keep_last,
            self.every_steps,
            self.average_last,
            self.average_every_steps,
            self.average_every_tokens,
        )
        if min(counts) < 0:
            raise ValueError("retention: counts are 0 or more")
        if not (math.isfinite(self.ages_s) and self.ages_s >= 0 and self.quarantined_s >= 0):
            raise ValueError("retention: ages are 0 or more seconds")
        if self.ages_factor < 2:
            raise ValueError("retention: the factor of ages is at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A checkpoint and why it is kept or deleted."""

    place: Place
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlan:
    """What becomes of every commit, newest first."""

    keep: tuple[Verdict, ...]
    delete: tuple[Verdict, ...]


def plan_retention(
    commits: Sequence[Candidate],
    now: float,
    policy: RetentionPolicy,
    in_use: Collection[Place] = (),
) -> RetentionPlan:
    """Decide what becomes of each commit.

    Args:
        commits: All of them, in any order.
        now: Unix seconds.
        policy: What to keep.
        in_use: What is being restored or read, and what restores fall back to: never deleted.
    """
    ordered = sorted(commits, key=lambda c: c.place, reverse=True)
    usable = [commit for commit in ordered if not commit.quarantined]
    current: list[Candidate] = []  # a later attempt at the same step stands for it
    for commit in usable:
        if not current or current[-1].step != commit.step:
            current.append(commit)
    reasons: dict[Place, list[str]] = defaultdict(list)
    for name, commit in zip(("the newest", "the fallback of the newest"), usable, strict=False):
        reasons[commit.place].append(name)
    for place in in_use:
        reasons[place].append("in use")
    for commit in current[: policy.keep_last]:
        reasons[commit.place].append(f"one of the last {policy.keep_last}")
    _by_slots(current, policy, reasons)
    _by_ages(current, policy, reasons)
    _in_quarantine(ordered, now, policy, reasons)
    keep, delete = [], []
    for commit in ordered:
        if why := reasons.get(commit.place):
            keep.append(Verdict(place=commit.place, why=", ".join(why)))
        else:
            delete.append(Verdict(place=commit.place, why=_why_not(commit, current, policy)))
    return RetentionPlan(keep=tuple(keep), delete=tuple(delete))


def _by_slots(
    current: Sequence[Candidate], policy: RetentionPolicy, reasons: dict[Place, list[str]]
) -> None:
    if every := policy.every_steps:
        for commit in _firsts(current, lambda c: c.step // every):
            reasons[commit.place].append(f"the first of {every} steps")
    if every := policy.average_every_steps:
        for commit in _firsts(current, lambda c: c.step // every)[: policy.average_last]:
            reasons[commit.place].append("for averaging")
    if every_tokens := policy.average_every_tokens:
        known = [commit for commit in current if commit.tokens is not None]
        for commit in current:
            if commit.tokens is None:  # perhaps the very one that is needed
                reasons[commit.place].append("its tokens are not known")
        slots = _firsts(known, lambda c: (c.tokens or 0) // every_tokens)
        for commit in slots[: policy.average_last]:
            reasons[commit.place].append("for averaging")


def _by_ages(
    current: Sequence[Candidate], policy: RetentionPolicy, reasons: dict[Place, list[str]]
) -> None:
    known = [commit for commit in current if commit.committed_at is not None]
    span = policy.ages_s
    for _ in range(_LEVELS):
        if not span or not known:
            return
        firsts = _firsts(known, lambda c, s=span: math.floor((c.committed_at or 0.0) / s))  # type: ignore[misc]
        for commit in firsts[:2]:
            reasons[commit.place].append(f"the first of {_duration(span)}")
        if len(firsts) <= 1:
            return  # wider spans have the same first one
        span *= policy.ages_factor


def _firsts(newest_first: Sequence[Candidate], slot: Callable[[Candidate], int]) -> list[Candidate]:
    """Return the first commit of each slot, newest slot first."""
    found: dict[int, Candidate] = {}
    for commit in newest_first:
        found[slot(commit)] = commit
    return [found[key] for key in sorted(found, reverse=True)]


def _in_quarantine(
    ordered: Sequence[Candidate],
    now: float,
    policy: RetentionPolicy,
    reasons: dict[Place, list[str]],
) -> None:
    for commit in ordered:
        at = commit.committed_at
        if commit.quarantined and (at is None or now - at < policy.quarantined_s):
            reasons[commit.place].append("in quarantine, kept to look into it")


def _why_not(commit: Candidate, current: Sequence[Candidate], policy: RetentionPolicy) -> str:
    if commit.quarantined:
        return f"in quarantine for more than {_duration(policy.quarantined_s)}"
    later = next((c for c in current if c.step == commit.step), commit)
    if later is not commit:
        return f"attempt {later.attempt} has committed the same step"
    return "no rule keeps it"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
