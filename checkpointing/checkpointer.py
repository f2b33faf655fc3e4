"""The rank's front: three lines in a training script.

ck = Checkpointer.from_env()
start = ck.restore(state)
for step in range(start, n):
    ...
    ck.step(step + 1, state)
ck.finish(n, state)
"""

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from checkpointing.environment import OnOtherWorld, RankEnvironment
from checkpointing.errors import StageBusy
from checkpointing.heartbeat import SLOW_PHASE, Heartbeat
from checkpointing.restoring import bring
from checkpointing.saving import SNAPSHOT_WAIT_S, WAIT_S, Saver, State, value_of
from checkpointing.slot import Phase
from checkpointing.tiers import EVERYWHERE, due

__all__ = ["Checkpointer", "RankEnvironment", "State"]

_log = logging.getLogger(__name__)


class Checkpointer:
    """Heartbeats, saves at step boundaries, and the restore before the first step.

    Without everstep around it (no `EVERSTEP_SLOT`) it does nothing and training starts at 0.

    Args:
        environment: What the agent says; None outside everstep.
        overlap: Copy beside the next forward and backward what only the optimizers change.
            Optimizers that the state names at its top level are known; others are told by `guard`.
            A script without either calls `fence` before everything that changes its state.
    """

    def __init__(self, environment: RankEnvironment | None, *, overlap: bool = False) -> None:
        self._env = environment
        self._heart = Heartbeat(environment) if environment else None
        self._saver = (
            Saver(environment, self._heart, overlap=overlap)
            if environment and self._heart
            else None
        )
        self._stop = False

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, *, overlap: bool = False
    ) -> "Checkpointer":
        """Make one from the `EVERSTEP_*` and torchrun variables of this process.

        From here on SIGTERM no longer ends the process, unless the agent announced it: a rank
        whose allocation ends has to live until it has saved. A script that handles SIGTERM itself,
        before or after this, keeps its own handler.
        """
        environment = RankEnvironment.read(os.environ if environ is None else environ)
        if environment is None:
            _log.warning("not started by everstep: no heartbeats, no checkpoints, start at step 0")
        checkpointer = cls(environment, overlap=overlap)
        if checkpointer._heart is not None:
            checkpointer._heart.guard()
        return checkpointer

    @property
    def should_stop(self) -> bool:
        """True once a planned stop is reached and its state is staged: leave the loop.

        Also when it could not be staged, since nobody may keep an allocation that ends.
        """
        return self._stop

    def restore(
        self,
        state: State,
        local: State | None = None,
        on_other_world: OnOtherWorld | None = None,
    ) -> int:
        """Bring the state to the checkpoint that this attempt starts from.

        Tensors are filled in place, objects with `load_state_dict` get it, plain dicts and lists
        are changed in place. A function has to return the same ones at every call.

        Args:
            state: Alike on all ranks.
            local: This rank's own, as random states and the place in the data.
            on_other_world: What to do about `local` when another number of ranks saved the
                checkpoint: `refuse` it, or leave `local` as it is, `fresh`; None for what the run's
                file says, which is to refuse it unless told.

        Returns:
            Number of finished steps; 0 for a fresh start.

        Raises:
            SystemExit: With `RESTORE_FAILED_EXIT`, `CHECKPOINT_DAMAGED_EXIT`, `STORE_AWAY_EXIT` or
                `STAGE_REFUSED_EXIT`, after one line on standard error.
        """
        if self._env is None or self._heart is None or self._saver is None:
            return 0
        self._heart.beat(Phase.RESTORE, SLOW_PHASE)
        whole, own = value_of(state), value_of(local) if local is not None else None
        fresh = on_other_world or self._env.on_other_world
        step = bring(self._env, self._saver.stager, (state, local), (whole, own), fresh)
        self._saver.prepare(whole, own)
        self._heart.note(step=-1 if step is None else step)
        self._heart.go()
        self._heart.beat(Phase.STEP, SLOW_PHASE)
        return step or 0

    def step(
        self,
        step: int,
        state: State | None = None,
        local: State | None = None,
        *,
        loss: float = math.nan,
        tokens: int = 0,
    ) -> None:
        """Tell that `step` steps are finished, and save when it is time.

        Args:
            step: Number of finished steps.
            state: As in `restore`; a callable is called only when there is a save; None never
                saves.
            local: As in `restore`.
            loss: Loss of this step, if known.
            tokens: Tokens trained so far.
        """
        if self._heart is None or self._saver is None:
            return
        self._heart.tick(step, loss, tokens)
        self._saver.land()
        control, interval = self._heart.control, self._heart.interval
        stopping = control is not None and 0 <= control.stop_step <= step
        first_stop = stopping and not self._stop  # a script may not look at `should_stop`
        snapshot = control is not None and step == control.snapshot_step
        tiers = due(step, interval, self._saver.rhythm)
        if first_stop or snapshot:
            tiers = EVERYWHERE
        if state is not None and tiers:
            wait_s = WAIT_S if first_stop else SNAPSHOT_WAIT_S if snapshot else 0.0
            self._saver.save(step, state, local, tiers, wait_s=wait_s, at_once=first_stop)
        self._stop = self._stop or stopping
        self._heart.go()

    def guard(self, optimizer: Any) -> None:
        """Let every step of this optimizer wait for a copy that runs beside training.

        What its parameters and its state hold may then be copied late.
        """
        if self._saver is not None:
            self._saver.guard(optimizer)

    def fence(self) -> None:
        """Return when the state may change; for scripts that overlap without an optimizer."""
        if self._saver is not None:
            self._saver.fence()

    def finish(self, step: int, state: State | None = None, local: State | None = None) -> None:
        """Save the last state if it is not saved yet, wait until it is staged, and say goodbye."""
        if self._heart is None or self._saver is None:
            return
        self._heart.note(step=step)
        self._saver.land()
        if state is not None:
            self._saver.save(step, state, local, EVERYWHERE, wait_s=WAIT_S, at_once=True)
            if not self._saver.has(step, EVERYWHERE):
                raise StageBusy(f"the last state could not be staged within {WAIT_S:.0f} s")
        self._heart.beat(Phase.FINISH, SLOW_PHASE)

    @contextmanager
    def phase(self, name: str, allowed_s: float = math.inf) -> Iterator[None]:
        """Say that something other than a step goes on, and for how long it may.

        Args:
            name: A `Phase`, as "eval".
            allowed_s: After this it counts as hung.
        """
        phase = Phase(name)
        if self._heart is None:
            yield
            return
        with self._heart.phase(phase, allowed_s):
            yield
