"""What the agent tells a rank through its environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from checkpointing.tiers import Rhythm

OnOtherWorld = Literal["refuse", "fresh"]
"""What becomes of a rank's own state when another number of ranks saved it."""


class StagePolicy(StrEnum):
    """What a save does that finds the uploads of those before it still running."""

    SKIP = "skip"  # is left out
    WAIT = "wait"  # for a slot, a bounded time
    REPLACE = "replace"  # takes the place of one that nobody began to upload


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
        local_world: Number of ranks on this node.
        policy: What a save does when the uploads before it still run.
        policy_wait_s: The longest that `StagePolicy.WAIT` holds training up.
        on_other_world: `refuse` or `fresh`, see `Checkpointer.restore`.
        stage_debug: Check that nothing changes while it is copied beside training.
        rhythm: How often snapshots go elsewhere than to the store.
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
    local_world: int = 1
    policy: StagePolicy = StagePolicy.SKIP
    policy_wait_s: float = 60.0
    on_other_world: OnOtherWorld = "refuse"
    stage_debug: bool = False
    rhythm: Rhythm = field(default_factory=Rhythm)

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
            local_world=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            policy=StagePolicy(environ.get("EVERSTEP_STAGE_POLICY", "skip")),
            policy_wait_s=float(environ.get("EVERSTEP_STAGE_WAIT_S", "60")),
            on_other_world="fresh"
            if environ.get("EVERSTEP_ON_OTHER_WORLD") == "fresh"
            else "refuse",
            stage_debug=environ.get("EVERSTEP_STAGE_DEBUG", "") not in ("", "0"),
            rhythm=Rhythm(
                memory=int(environ.get("EVERSTEP_MEMORY_STEPS", "0")),
                peer=int(environ.get("EVERSTEP_PEER_STEPS", "0")),
                disk=int(environ.get("EVERSTEP_DISK_STEPS", "0")),
            ),
        )
