"""What a save cost: measured rank by rank, kept in the journal as one sum."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCost:
    """One rank's part of a save; nan, and 0 for bytes and tokens, means not measured.

    Attributes:
        stall_s: For how long it held training up.
        stage_s: From the step boundary until the copy was complete.
        staged_nbytes: Bytes copied into the node's memory.
        tokens: Tokens trained until then.
        sent_nbytes: Bytes that went to the store; 0 also when the object was there already.
        sent_s: How long that took.
        retries: Requests made again, by the store's code for the reason.
        hedges: Parts that were sent twice because they were late.
        plane: Who sent the bytes: "boto3", "awscrt" or "directory".
    """

    stall_s: float = NAN
    stage_s: float = NAN
    staged_nbytes: int = 0
    tokens: int = 0
    sent_nbytes: int = 0
    sent_s: float = NAN
    retries: dict[str, int] = field(default_factory=dict)
    hedges: int = 0
    plane: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """A whole save: bytes are those of all ranks, seconds those of the slowest.

    Attributes:
        ranks: How many ranks told what their part cost.
        upload_s: From the step boundary until all of it was in the store.
        age_s: Age of the checkpoint committed before, when this one took its place as the newest.
        planes: Who sent the bytes.

    The others are as in `ShardCost`.
    """

    ranks: int = 0
    stall_s: float = NAN
    stage_s: float = NAN
    staged_nbytes: int = 0
    tokens: int = 0
    sent_nbytes: int = 0
    sent_s: float = NAN
    upload_s: float = NAN
    age_s: float = NAN
    retries: dict[str, int] = field(default_factory=dict)
    hedges: int = 0
    planes: tuple[str, ...] = ()

    @property
    def stage_bytes_per_s(self) -> float | None:
        """Speed of the copies of all ranks together, None when not measured."""
        return _speed(self.staged_nbytes, self.stage_s)

    @property
    def upload_bytes_per_s(self) -> float | None:
        """Speed of the uploads of all ranks together, None when nothing was sent."""
        return _speed(self.sent_nbytes, self.sent_s)


def together(costs: Iterable[ShardCost], *, upload_s: float, age_s: float) -> SaveCost:
    """Sum up what the ranks told."""
    told = tuple(costs)
    retries: Counter[str] = Counter()
    for cost in told:
        retries.update(cost.retries)
    return SaveCost(
        ranks=len(told),
        stall_s=slowest(cost.stall_s for cost in told),
        stage_s=slowest(cost.stage_s for cost in told),
        # Of those alone whose time is known: else the speed would be that of nobody.
        staged_nbytes=sum(c.staged_nbytes for c in told if not math.isnan(c.stage_s)),
        tokens=max((cost.tokens for cost in told), default=0),
        sent_nbytes=sum(c.sent_nbytes for c in told if not math.isnan(c.sent_s)),
        sent_s=slowest(cost.sent_s for cost in told),
        upload_s=upload_s,
        age_s=age_s,
        retries=dict(sorted(retries.items())),
        hedges=sum(cost.hedges for cost in told),
        planes=tuple(sorted({cost.plane for cost in told if cost.plane})),
    )


def slowest(seconds: Iterable[float]) -> float:
    """Return the longest of those that were measured, nan for none."""
    return max((value for value in seconds if not math.isnan(value)), default=NAN)


def _speed(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if nbytes > 0 and seconds > 0 else None
