"""What the tables of a run's TOML have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
Steps = Annotated[int, Field(ge=1, le=10**12)]


class Section(BaseModel):
    """A table of the TOML: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
