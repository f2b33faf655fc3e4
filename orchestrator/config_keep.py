"""`[checkpoint.keep]`: which checkpoints stay in the store while the run goes on."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from checkpointing.retention import RetentionPolicy
from orchestrator.config_base import Section

LONGEST_S = 10 * 365 * 86_400.0
Count = Annotated[int, Field(ge=0, le=10**15)]


class KeepSection(Section):
    """`[checkpoint.keep]`: with this table the run deletes what no rule keeps, without it nothing.

    Kept are the `last` so many, the first one of each `every_steps` for ever, by age the first of
    the last two spans of `ages_s`, of twice that, and so on, and for averages `average_last`, each
    the first one of `average_every_steps` or `average_every_tokens`. 0 turns a rule off. The two
    newest that can be restored are kept in any case, and those in quarantine for `quarantined_s`.
    """

    last: Count = 3
    every_steps: Count = 0
    ages_s: Annotated[float, Field(ge=0, le=LONGEST_S)] = 3_600.0
    ages_factor: Annotated[int, Field(ge=2, le=1_000)] = 2
    average_last: Annotated[int, Field(ge=1, le=1_000)] | None = None
    average_every_steps: Count = 0
    average_every_tokens: Count = 0
    quarantined_s: Annotated[float, Field(ge=0, le=LONGEST_S)] = 7 * 86_400.0

    @model_validator(mode="after")
    def _averages(self) -> Self:
        is_spaced = self.average_every_steps or self.average_every_tokens
        if self.average_last is not None and not is_spaced:
            raise ValueError(
                "average_last needs average_every_steps or average_every_tokens; "
                "set one of them or remove it"
            )
        return self

    def policy(self) -> RetentionPolicy:
        """Return it as retention wants it."""
        return RetentionPolicy(
            keep_last=self.last,
            every_steps=self.every_steps,
            ages_s=self.ages_s,
            ages_factor=self.ages_factor,
            average_last=self.average_last or RetentionPolicy().average_last,
            average_every_steps=self.average_every_steps,
            average_every_tokens=self.average_every_tokens,
            quarantined_s=self.quarantined_s,
        )
