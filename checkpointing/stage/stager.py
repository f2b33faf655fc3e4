"""From a live state to a staged slot: flatten, plan (cached by structure), room, copy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import StageBusy, StageError, StageRefused
from checkpointing.plan import Plan, make_plan, structure_hash
from checkpointing.stage.writer import ArenaWriter, Snapshot
from checkpointing.tree import flatten


class Stager:
    """Stages the states of one rank in one attempt."""

    def __init__(self, arena: Path, *, attempt: int, rank: int, world: int) -> None:
        self._path = arena
        self._attempt = attempt
        self._rank = rank
        self._world = world
        self._writer: ArenaWriter | None = None
        self._plan: Plan | None = None

    def prepare(self, state: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Take the memory for states of this structure.

        Raises:
            StageRefused: There is not enough.
            TypeError: The state holds something that cannot be kept exactly.
        """
        self._snapshot(0, state, local)

    def has_room(self) -> bool:
        """Tell whether a save would find a free slot now."""
        return self._writer is None or self._writer.has_room()

    def stage(self, step: int, state: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Copy a state into a free slot.

        Raises:
            StageBusy: Both slots are still needed.
            StageRefused: The state has grown and memory for it is missing.
        """
        writer, snapshot = self._snapshot(step, state, local)
        try:
            writer.stage(snapshot)
        except (StageBusy, StageRefused):
            raise
        except StageError:  # the Python values have outgrown their room
            writer.ensure(snapshot)
            writer.stage(snapshot)

    def _snapshot(
        self, step: int, state: Mapping[str, Any], local: Mapping[str, Any] | None
    ) -> tuple[ArenaWriter, Snapshot]:
        replica, own = flatten(state), flatten(local or {})
        structure = structure_hash(replica, own, self._rank, self._world)
        plan = self._plan
        known = plan is not None and plan.structure == structure
        if plan is None or not known:
            plan = make_plan(replica, own, self._rank, self._world)
        snapshot = Snapshot(
            step=step,
            attempt=self._attempt,
            rank=self._rank,
            world=self._world,
            replica=replica,
            local=own,
            plan=plan,
        )
        if self._writer is None:
            self._writer = ArenaWriter(self._path)
        if not known:
            self._writer.ensure(snapshot)
            self._plan = plan
        return self._writer, snapshot
