"""The rank's front: three lines in a training script.

ck = Checkpointer.from_env()
start = ck.restore(state)
for step in range(start, n):
    ...
    ck.step(step + 1, state)
ck.finish(n, state)
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NoReturn

from checkpointing.environment import RankEnvironment
from checkpointing.errors import (
    RESTORE_FAILED_EXIT,
    STAGE_REFUSED_EXIT,
    CheckpointingError,
    RestoreFailed,
    StageBusy,
    StageRefused,
)
from checkpointing.guard import TermGuard
from checkpointing.restore import Point, restore_from_memory, restore_from_store
from checkpointing.slot import Control, Phase, RankSlot, SlotReading
from checkpointing.stage.stager import Stager
from checkpointing.store.base import StoreConfig, open_store
from checkpointing.tree import flatten

State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_SLOW_PHASE: Final = 10.0  # what is not a step may take this many step timeouts
_SMOOTHING: Final = 0.2
_WAIT_S: Final = 600.0
_SNAPSHOT_WAIT_S: Final = 5.0  # the longest that training waits for an upload, when asked to
_POLL_S: Final = 0.02
_log = logging.getLogger(__name__)


class Checkpointer:
    """Heartbeats, saves at step boundaries, and the restore before the first step.

    Without everstep around it (no `EVERSTEP_SLOT`) it does nothing and training starts at 0.
    """

    def __init__(self, environment: RankEnvironment | None) -> None:
        self._env = environment
        self._slot = RankSlot(environment.slot) if environment else None
        self._stager = (
            Stager(
                environment.arena,
                attempt=environment.attempt,
                rank=environment.rank,
                world=environment.world,
            )
            if environment
            else None
        )
        self._guard: TermGuard | None = None
        self._control: Control | None = None
        self._interval = 0
        self._staged_step = -1
        self._stop = False
        self._first = True
        self._mark = time.monotonic()
        self._reading = SlotReading(pid=os.getpid())
        self._beat(Phase.INIT, self._allowed(_SLOW_PHASE))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Checkpointer":
        """Make one from the `EVERSTEP_*` and torchrun variables of this process.

        From here on SIGTERM no longer ends the process, unless the agent announced it: a rank
        whose allocation ends has to live until it has saved. A script that handles SIGTERM itself,
        before or after this, keeps its own handler.
        """
        environment = RankEnvironment.read(os.environ if environ is None else environ)
        if environment is None:
            _log.warning("not started by everstep: no heartbeats, no checkpoints, start at step 0")
        checkpointer = cls(environment)
        checkpointer._guard_itself()
        return checkpointer

    @property
    def should_stop(self) -> bool:
        """True once a planned stop is reached and its state is staged: leave the loop.

        Also when it could not be staged, since nobody may keep an allocation that ends.
        """
        return self._stop

    def restore(self, state: State, local: State | None = None) -> int:
        """Bring the state to the checkpoint that this attempt starts from.

        Tensors are filled in place, objects with `load_state_dict` get it, plain dicts and lists
        are changed in place. A function has to return the same ones at every call.

        Args:
            state: Alike on all ranks.
            local: This rank's own, as random states and the place in the data.

        Returns:
            Number of finished steps; 0 for a fresh start.

        Raises:
            SystemExit: With `RESTORE_FAILED_EXIT` or `STAGE_REFUSED_EXIT`, after one line on
                standard error.
        """
        if self._env is None or self._stager is None:
            return 0
        self._beat(Phase.RESTORE, self._allowed(_SLOW_PHASE))
        whole, own = _value(state), _value(local) if local is not None else None
        flatten(whole), flatten(own or {})  # what cannot be saved is the script's mistake: now
        step = 0
        try:
            wanted = json.loads(self._env.restore)
            if wanted is not None:
                step = self._restore_to(self._env, wanted, whole, own)
                _reached(state, whole)
                _reached(local, own)
        except (CheckpointingError, OSError, ValueError, KeyError, TypeError) as error:
            _leave(RESTORE_FAILED_EXIT, f"rank {self._env.rank}: restore failed: {error}")
        try:
            self._stager.prepare(whole, own)
        except StageRefused as error:
            _leave(STAGE_REFUSED_EXIT, f"rank {self._env.rank}: {error}")
        self._reading = replace(self._reading, step=step if wanted is not None else -1)
        self._mark = time.monotonic()
        self._beat(Phase.STEP, self._allowed(_SLOW_PHASE))
        return step

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
        if self._stager is None:
            return
        self._tick(step, loss, tokens)
        self._follow_control(step)
        control = self._control
        stopping = control is not None and 0 <= control.stop_step <= step
        first_stop = stopping and not self._stop  # a script may not look at `should_stop`
        snapshot = control is not None and step == control.snapshot_step
        regular = self._interval > 0 and step % self._interval == 0
        if state is not None and (first_stop or snapshot or regular):
            wait_s = _WAIT_S if first_stop else _SNAPSHOT_WAIT_S if snapshot else 0.0
            self._save(self._stager, step, state, local, wait_s=wait_s)
        self._stop = self._stop or stopping
        self._mark = time.monotonic()

    def finish(self, step: int, state: State | None = None, local: State | None = None) -> None:
        """Save the last state if it is not saved yet, wait until it is staged, and say goodbye."""
        if self._stager is None:
            return
        self._reading = replace(self._reading, step=step)
        if state is not None and self._staged_step != step:
            self._save(self._stager, step, state, local, wait_s=_WAIT_S)
            if self._staged_step != step:
                raise StageBusy(f"the last state could not be staged within {_WAIT_S:.0f} s")
        self._beat(Phase.FINISH, self._allowed(_SLOW_PHASE))

    @contextmanager
    def phase(self, name: str, allowed_s: float = math.inf) -> Iterator[None]:
        """Say that something other than a step goes on, and for how long it may.

        Args:
            name: A `Phase`, as "eval".
            allowed_s: After this it counts as hung.
        """
        started = time.monotonic()
        self._beat(Phase(name), allowed_s)
        try:
            yield
        finally:
            self._mark += time.monotonic() - started
            self._beat(Phase.STEP, self._allowed(1.0))

    def _restore_to(
        self,
        env: RankEnvironment,
        wanted: Mapping[str, Any],
        state: Mapping[str, Any],
        local: Mapping[str, Any] | None,
    ) -> int:
        point = Point(step=int(wanted["step"]), attempt=int(wanted["attempt"]))
        if wanted["source"] == "memory":
            restore_from_memory(env.arena, point, env.rank, env.world, state, local)
        elif wanted["source"] == "store":
            store = open_store(StoreConfig.from_json(env.store))
            restore_from_store(store, env.run, point, env.rank, env.world, state, local, env.arena)
        else:
            raise RestoreFailed(f"unknown source {wanted['source']!r}")
        return point.step

    def _save(
        self,
        stager: Stager,
        step: int,
        state: State,
        local: State | None,
        wait_s: float,
    ) -> None:
        if self._staged_step == step:
            return
        self._beat(Phase.CHECKPOINT, self._allowed(_SLOW_PHASE) + wait_s)
        if not self._wait_for_room(stager, wait_s):
            self._skipped()
        else:
            begun = time.monotonic()
            own = _value(local) if local is not None else None
            try:
                stager.stage(step, _value(state), own)
            except StageBusy:
                self._skipped()
            except StageRefused as error:
                _leave(STAGE_REFUSED_EXIT, f"cannot stage step {step}: {error}")
            else:
                self._saved(step, begun)
        self._beat(Phase.STEP, self._allowed(1.0))

    def _saved(self, step: int, begun: float) -> None:
        self._staged_step = step
        self._reading = replace(
            self._reading, saves=self._reading.saves + 1, stall_s=time.monotonic() - begun
        )

    def _skipped(self) -> None:
        self._reading = replace(self._reading, skipped_saves=self._reading.skipped_saves + 1)

    @staticmethod
    def _wait_for_room(stager: Stager, wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while not stager.has_room():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _tick(self, step: int, loss: float, tokens: int) -> None:
        took, old = time.monotonic() - self._mark, self._reading.step_s
        if self._first:
            smooth = old  # the first step compiles and warms up
        else:
            smooth = took if math.isnan(old) else old + _SMOOTHING * (took - old)
        self._first = False
        self._reading = replace(self._reading, step=step, loss=loss, step_s=smooth, tokens=tokens)
        self._beat(Phase.STEP, self._allowed(1.0))

    def _guard_itself(self) -> None:
        if self._slot is not None:
            slot = self._slot
            self._guard = TermGuard.install(lambda: bool((now := slot.control()) and now.terminate))
            self._reading = replace(self._reading, guarded=self._guard is not None)
            self._slot.publish(self._reading)

    def _follow_control(self, step: int) -> None:
        control = self._slot.control() if self._slot else None
        if control is not None:
            self._control = control
        if self._control is not None and step >= self._control.effective_step:
            self._interval = self._control.interval_steps

    def _allowed(self, factor: float) -> float:
        return factor * self._env.step_timeout_s if self._env else math.inf

    def _beat(self, phase: Phase, allowed_s: float) -> None:
        self._reading = replace(
            self._reading,
            phase=phase,
            phase_since=time.monotonic(),
            allowed_s=allowed_s,
            beats=self._reading.beats + 1,
            guarded=self._guard is not None and self._guard.holds,
        )
        if self._slot is not None:
            self._slot.publish(self._reading)


def _value(state: State) -> Mapping[str, Any]:
    return state() if callable(state) else state


def _reached(source: State | None, restored: Mapping[str, Any] | None) -> None:
    """Check that a callable now returns what was restored, not plain values from elsewhere."""
    if not callable(source) or restored is None:
        return
    if flatten(source()).skeleton != flatten(restored).skeleton:
        raise RestoreFailed(
            "the function that gives the state makes plain values anew, which cannot be restored: "
            "give a mapping, or an object with load_state_dict()"
        )


def _leave(code: int, message: str) -> NoReturn:
    sys.stderr.write(f"everstep: {' '.join(message.split())}\n")
    sys.stderr.flush()
    sys.exit(code)
