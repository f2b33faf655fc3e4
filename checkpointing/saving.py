"""When a state is staged, whether beside training, and what gives way when no slot is free."""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from checkpointing.environment import RankEnvironment, StagePolicy
from checkpointing.errors import STAGE_REFUSED_EXIT, StageBusy, StageError, StageRefused
from checkpointing.heartbeat import SLOW_PHASE, Heartbeat
from checkpointing.slot import Phase
from checkpointing.stage.arena import StagedSlot
from checkpointing.stage.guards import Guards
from checkpointing.stage.stager import Stager
from checkpointing.tiers import EVERYWHERE, NOWHERE, Rhythm, Tier

State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""A state, or a function that returns it."""

WAIT_S: Final = 600.0
"""The longest that a last save waits for an upload."""

SNAPSHOT_WAIT_S: Final = 5.0
"""The longest that training waits for an upload, when a snapshot was asked for."""

_POLL_S: Final = 0.02
_log = logging.getLogger(__name__)


class Saver:
    """The saves of one rank."""

    def __init__(self, environment: RankEnvironment, heart: Heartbeat, *, overlap: bool) -> None:
        self._env = environment
        self._heart = heart
        self._stager = Stager(
            environment.arena,
            attempt=environment.attempt,
            rank=environment.rank,
            world=environment.world,
            local_world=environment.local_world,
            debug=environment.stage_debug,
        )
        self._guards = Guards(self.fence)
        self._overlaps = overlap
        self._is_flying = False
        self._is_fencing_script = False
        self._staged_tiers = NOWHERE
        # Without a store nobody would ever take a slot that waits for it.
        self._there = EVERYWHERE if environment.store else EVERYWHERE & ~Tier.STORE
        self.staged_step = -1

    @property
    def rhythm(self) -> Rhythm:
        """How often snapshots go elsewhere than to the store."""
        return self._env.rhythm

    def has(self, step: int, tiers: Tier) -> bool:
        """Whether the state after `step` is staged, and for the store if these tiers name it."""
        wanted = tiers & self._there & Tier.STORE
        return self.staged_step == step and wanted in self._staged_tiers

    @property
    def stager(self) -> Stager:
        """What copies the states."""
        return self._stager

    def prepare(self, state: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Take the memory before the first step, or end the process with the numbers."""
        if self._overlaps:
            self._guards.find(state)
        try:
            self._stager.prepare(state, local)
        except StageRefused as error:
            leave(STAGE_REFUSED_EXIT, f"rank {self._env.rank}: {error}")

    def guard(self, optimizer: Any) -> None:
        """Let every step of an optimizer wait for the copy that runs."""
        if self._overlaps:
            self._guards.add(optimizer)

    def fence(self) -> None:
        """Return when the state may change."""
        self._is_fencing_script = True
        if self._is_flying:
            if self._env.stage_debug:
                self.land()  # says at once what changed
                return
            begun = time.monotonic()
            self._stager.fence()
            self._heart.note(stall_s=self._heart.reading.stall_s + time.monotonic() - begun)

    def land(self) -> None:
        """Bring the copy that runs to its end; what changed too early is not kept.

        Raises:
            StageError: Something changed, and this is what the debug mode looks for.
        """
        if not self._is_flying:
            return
        self._is_flying = False
        if self._stager.awaits_fence and not self._env.stage_debug:
            self._stager.join(abandon=True)
            self._lost("nobody called fence() before the step, so what was copied may be mixed")
            return
        begun = time.monotonic()
        changed = self._stager.join()
        self._heart.note(stall_s=self._heart.reading.stall_s + time.monotonic() - begun)
        self._note_copy()
        if changed:
            names = ", ".join(changed[:5]) + (" and more" if len(changed) > 5 else "")
            self._lost(f"changed while it was copied beside training: {names}")

    def save(
        self,
        step: int,
        state: State,
        local: State | None,
        tiers: Tier,
        *,
        wait_s: float,
        at_once: bool,
    ) -> None:
        """Stage a state unless it is already, waiting for a free slot up to `wait_s`."""
        if self.has(step, tiers):
            return
        tiers &= self._there
        is_regular = wait_s == 0
        replaces = is_regular and self._env.policy is StagePolicy.REPLACE
        if is_regular and self._env.policy is StagePolicy.WAIT:
            wait_s = self._env.policy_wait_s
        self._heart.beat(Phase.CHECKPOINT, SLOW_PHASE, wait_s)
        if self._wait_for_room(wait_s, replace=replaces):
            self._stage(step, state, local, tiers, replace=replaces, at_once=at_once)
        else:
            self._skipped()
        self._heart.beat(Phase.STEP)

    def _stage(
        self,
        step: int,
        state: State,
        local: State | None,
        tiers: Tier,
        *,
        replace: bool,
        at_once: bool,
    ) -> None:
        begun = time.monotonic()
        own = value_of(local) if local is not None else None
        try:
            values = value_of(state), own
            dropped = self._copy(step, values, tiers, replace=replace, at_once=at_once)
        except StageBusy:
            self._skipped()
        except StageRefused as error:
            leave(STAGE_REFUSED_EXIT, f"cannot stage step {step}: {error}")
        else:
            self.staged_step, self._staged_tiers = step, tiers
            reading = self._heart.reading
            self._heart.note(
                saves=reading.saves + 1,
                stall_s=time.monotonic() - begun,
                saved_step=step,
                saved_tokens=reading.tokens if reading.step == step else 0,
                dropped_saves=reading.dropped_saves + (dropped is not None),
            )
            self._note_copy()

    def _copy(
        self,
        step: int,
        values: tuple[Mapping[str, Any], Mapping[str, Any] | None],
        tiers: Tier,
        *,
        replace: bool,
        at_once: bool,
    ) -> StagedSlot | None:
        state, local = values
        if self._overlaps:
            self._guards.find(state)
        # A script that fences by itself has done so before its second step.
        if not self._overlaps or at_once or not (self._guards or self._is_fencing_script):
            return self._stager.stage(step, state, local, replace=replace, tiers=tiers)
        late = self._guards.addresses() if self._guards else None
        self._is_flying = True
        return self._stager.begin(step, state, local, late=late, replace=replace, tiers=tiers)

    def _lost(self, why: str) -> None:
        step, self.staged_step = self.staged_step, -1
        self._overlaps = False
        self._heart.note(dropped_saves=self._heart.reading.dropped_saves + 1, saved_step=-1)
        text = f"the save of step {step} does not count: {why}"
        if self._env.stage_debug:
            raise StageError(text)
        _log.warning("rank %d: %s; saves are no longer overlapped", self._env.rank, text)

    def _note_copy(self) -> None:
        copied = self._stager.copied
        nbytes, seconds = copied if copied is not None else (0, math.nan)
        self._heart.note(stage_s=seconds, staged_nbytes=nbytes)

    def _skipped(self) -> None:
        self._heart.note(skipped_saves=self._heart.reading.skipped_saves + 1)

    def _wait_for_room(self, wait_s: float, *, replace: bool) -> bool:
        deadline = time.monotonic() + wait_s
        while not self._stager.has_room(replace=replace):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


def value_of(state: State) -> Mapping[str, Any]:
    """Return the state itself."""
    return state() if callable(state) else state


def leave(code: int, message: str) -> NoReturn:
    """End this process with one line on standard error."""
    sys.stderr.write(f"everstep: {' '.join(message.split())}\n")
    sys.stderr.flush()
    sys.exit(code)
