"""What the tables of a run's TOML have in common."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

# TOML has neither paths nor tuples: these two alone are made from something else.
Folder = Annotated[Path, Field(strict=False)]
LIST = Field(strict=False)

Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
Steps = Annotated[int, Field(ge=1, le=10**12)]


class Section(BaseModel):
    """A table of the TOML: unknown keys are errors, values never change, nothing is converted.

    `true` is no number, `"5"` no number either, and `inf` is none that a frozen file could hold.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _names_possible_files(self) -> Self:
        """Refuse a path that no system call takes: agents would die of it, one after the other."""
        for key in type(self).model_fields:
            value = getattr(self, key)
            if isinstance(value, Path) and "\0" in str(value):
                raise ValueError(f"{key}: no path holds a NUL character; remove it")
        return self
