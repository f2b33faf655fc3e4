"""What the agent tells a rank through its environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """The variables `EVERSTEP_*` and torchrun's that checkpointing needs.

    Attributes:
        run: Name of the run.
        attempt: Number of the attempt.
        rank: This rank.
        world: Number of ranks.
        slot: This rank's slot file.
        arena: This rank's arena file.
        store: `StoreConfig` as JSON.
        restore: JSON of step, attempt and source, or `null` for a fresh start.
        step_timeout_s: How long one step may take; inf for no bound.
    """

    run: str
    attempt: int
    rank: int
    world: int
    slot: Path
    arena: Path
    store: str
    restore: str
    step_timeout_s: float

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "RankEnvironment | None":
        """Read it; None when this process was not started by everstep."""
        if "EVERSTEP_SLOT" not in environ:
            return None
        return cls(
            run=environ["EVERSTEP_RUN"],
            attempt=int(environ["EVERSTEP_ATTEMPT"]),
            rank=int(environ["RANK"]),
            world=int(environ["WORLD_SIZE"]),
            slot=Path(environ["EVERSTEP_SLOT"]),
            arena=Path(environ["EVERSTEP_ARENA"]),
            store=environ.get("EVERSTEP_STORE", ""),
            restore=environ.get("EVERSTEP_RESTORE", "null"),
            step_timeout_s=float(environ.get("EVERSTEP_STEP_TIMEOUT_S", "inf")),
        )
