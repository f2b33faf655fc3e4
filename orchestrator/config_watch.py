"""`[checkpoint.watch]`: the folders of a trainer that writes its own checkpoints."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from orchestrator.config_base import Folder, Section


class WatchSection(Section):
    """Which folders of `dir` each node keeps in the store, and when.

    `finished` says when a folder that fits `pattern` is whole: "rename", it has its name from then
    on; "marker", the file `marker` is in it; "quiet", nothing in it changed for `quiet_s`. With
    `delete` it is deleted once committed, but for the newest `keep`. `shared` says whether all
    nodes see the same `dir`; with several nodes it has to be said.
    """

    dir: Folder
    pattern: Annotated[str, Field(min_length=1)]
    finished: Literal["quiet", "marker", "rename"] = "quiet"
    marker: str = ""
    quiet_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    delete: bool = False
    keep: Annotated[int, Field(ge=0, le=10_000)] = 1
    shared: bool | None = None

    @model_validator(mode="after")
    def _says_when(self) -> Self:
        if (self.finished == "marker") != bool(self.marker):
            raise ValueError('finished = "marker" and the key marker go together')
        if self.marker.startswith("/") or re.search(r"(^|/)\.\.(/|$)", self.marker):
            raise ValueError("marker is a path inside of the folder")
        if "\0" in self.pattern + self.marker:
            raise ValueError("pattern and marker: no name holds a NUL character; remove it")
        if "/" in self.pattern or self.pattern.startswith("."):
            raise ValueError("pattern is for names directly in dir, none of them hidden")
        return self
