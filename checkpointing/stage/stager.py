"""From a live state to a staged slot: take it apart, lay it out (both remembered), copy."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing.extents import LOCAL
from checkpointing.plan import Plan
from checkpointing.stage.arena import MappedArena, StagedSlot
from checkpointing.stage.copying import Copy, lies_in_a_row
from checkpointing.stage.crew import Crew, Task, share_of_cores
from checkpointing.stage.cuda import Registration, SideStream, is_on_gpu
from checkpointing.stage.flight import Flight, Watched, version_of
from checkpointing.stage.taking import State, Taken, Taker
from checkpointing.stage.writer import ArenaWriter, Label
from checkpointing.tiers import EVERYWHERE, Tier


class Stager:
    """Stages the states of one rank in one attempt.

    Args:
        arena: The rank's file.
        attempt: Number of the attempt.
        rank: The rank.
        world: Number of ranks.
        local_world: How many of them share this node's memory and cores.
        debug: Compare what was copied beside training with what it is at the fence.
    """

    def __init__(
        self,
        arena: Path,
        *,
        attempt: int,
        rank: int,
        world: int,
        local_world: int = 1,
        debug: bool = False,
    ) -> None:
        self._path = arena
        self._attempt = attempt
        self._rank = rank
        self._world = world
        self._local_world = local_world
        self._debug = debug
        self._crew = Crew(share_of_cores(local_world))
        self._writer: ArenaWriter | None = None
        self._taker = Taker(rank, world)
        self._flight: Flight | None = None
        self._copied: tuple[int, float] | None = None
        self._sides: dict[Any, SideStream] = {}
        self._registration: Registration | None = None

    def prepare(self, state: State, local: State | None) -> None:
        """Take the memory for states of this structure.

        Raises:
            StageRefused: There is not enough.
            TypeError: The state holds something that cannot be kept exactly.
        """
        self._make_room(self._taker.take(state, local))

    @property
    def crew(self) -> Crew:
        """The threads that copy."""
        return self._crew

    def arena(self) -> MappedArena | None:
        """Return what is staged already, mapped once for this and all saves; None for nothing."""
        return self._arena_writer().arena

    def has_room(self, *, replace: bool = False) -> bool:
        """Tell whether a save would find a free slot now.

        Args:
            replace: A snapshot that nobody began to upload may be dropped for it.
        """
        return self._writer is None or self._writer.has_room(replace=replace)

    def stage(
        self,
        step: int,
        state: State,
        local: State | None,
        *,
        replace: bool = False,
        tiers: Tier = EVERYWHERE,
    ) -> StagedSlot | None:
        """Copy a state into a free slot; return the snapshot that was dropped unsent for it.

        Raises:
            StageBusy: Every slot is still needed.
            StageRefused: The state has grown and memory for it is missing.
        """
        dropped = self._start(step, state, local, set(), replace=replace, tiers=tiers)
        self.join()
        return dropped

    def begin(
        self,
        step: int,
        state: State,
        local: State | None,
        *,
        late: set[int] | None,
        replace: bool = False,
        tiers: Tier = EVERYWHERE,
    ) -> StagedSlot | None:
        """Copy as `stage` does, but what is at the addresses `late` beside training.

        The Python values, the rank's own state and everything else are taken before this returns.

        Args:
            step: Number of finished steps.
            state: Alike on all ranks.
            local: This rank's own.
            late: Addresses of tensors that change only after `fence`; None for all of the state,
                which then counts only once `fence` was called.
            replace: As in `has_room`.
            tiers: Where the snapshot is to be kept.
        """
        return self._start(step, state, local, late, replace=replace, tiers=tiers)

    def fence(self) -> None:
        """Return when the state may change."""
        if self._flight is not None:
            self._flight.fence()

    @property
    def awaits_fence(self) -> bool:
        """Whether a copy runs that counts only after a `fence` that nobody has called yet."""
        return self._flight is not None and self._flight.awaits_fence

    @property
    def copied(self) -> tuple[int, float] | None:
        """Bytes of the last copy and the seconds until it was complete, None while it is not."""
        return self._copied

    def join(self, *, abandon: bool = False) -> list[str]:
        """Wait for the copy that runs; return the tensors that changed before the fence.

        If there are any, the slot does not count.

        Args:
            abandon: Let the slot not count, if it does not already.
        """
        flight, self._flight = self._flight, None
        return flight.join(abandon=abandon) if flight is not None else []

    def _start(
        self,
        step: int,
        state: State,
        local: State | None,
        late: set[int] | None,
        *,
        replace: bool,
        tiers: Tier,
    ) -> StagedSlot | None:
        self.join()
        begun, self._copied = time.monotonic(), None
        taken = self._taker.take(state, local)
        writer, plan = self._make_room(taken), taken.known.plan
        index, data, dropped = writer.open(replace=replace)
        copy = Copy(plan.extents, taken.leaves, data)
        label = Label(
            step=step, attempt=self._attempt, rank=self._rank, world=self._world, tiers=tiers
        )

        def seal() -> None:
            packed = taken.known.text.pack(taken.values, copy.result())
            writer.seal(index, label, plan.data_nbytes, packed)
            self._copied = plan.data_nbytes, time.monotonic() - begun

        watched = _watched(plan, taken.leaves, late)
        events, summing = self._copy_from_gpus(copy, taken.leaves, watched)
        self._copy_now(copy, taken.leaves, watched)
        flight = Flight(
            copy,
            watched,
            seal,
            needs_fence=late is None,
            compares=self._debug and bool(watched),
            events=events,
        )
        self._flight = flight
        on_cpu = [w.number for w in watched if not is_on_gpu(w.leaf)]
        flight.start(self._crew, copy.tasks(on_cpu, beside_training=True), summing)
        return dropped

    def _copy_now(self, copy: Copy, leaves: Sequence[Any], watched: Sequence[Watched]) -> None:
        later = {w.number for w in watched}
        rows: list[int] = []
        odd: list[int] = []
        for number, leaf in enumerate(leaves):
            if number not in later and not is_on_gpu(leaf):
                (rows if lies_in_a_row(leaf) else odd).append(number)
        for number in odd:
            copy.copy_oddly(number)
        self._crew.run(copy.tasks(rows))

    def _copy_from_gpus(
        self, copy: Copy, leaves: Sequence[Any], watched: Sequence[Watched]
    ) -> tuple[list[tuple[SideStream, Any]], list[Task]]:
        """Begin what the copy engines do, and return what to wait for and what to sum then."""
        later = {w.number for w in watched}
        by_device: dict[Any, list[int]] = {}
        for number, leaf in enumerate(leaves):
            if is_on_gpu(leaf):
                by_device.setdefault(leaf.device, []).append(number)
        if not by_device:
            return [], []
        if self._registration is None and self._writer is not None:
            self._registration = Registration(self._writer.memory)
        events: list[tuple[SideStream, Any]] = []
        summing: list[Task] = []
        for device, numbers in by_device.items():
            side = self._sides.setdefault(device, SideStream(device))
            now = [(leaves[n], copy.place(n)) for n in numbers if n not in later]
            late = [(leaves[n], copy.place(n)) for n in numbers if n in later]
            event = side.copy(now, late)
            events.append((side, event))
            summing += [partial(_after, event, task) for task in copy.sum_only(numbers)]
        return events, summing

    def _make_room(self, taken: Taken) -> ArenaWriter:
        writer = self._arena_writer()
        writer.ensure(taken.known.text.longest(taken.values), taken.known.plan.data_nbytes)
        return writer

    def _arena_writer(self) -> ArenaWriter:
        if self._writer is None:
            self._writer = ArenaWriter(self._path, self._local_world, self._unregister)
        return self._writer

    def _unregister(self) -> None:
        if self._registration is not None:
            self._registration.close()
            self._registration = None


def _watched(plan: Plan, leaves: Sequence[Any], late: set[int] | None) -> list[Watched]:
    """Choose what may be copied late: it changes at one known place and lies in a row here."""
    if late is not None and not late:
        return []
    found = []
    may_wait = (plan.extents.kind != LOCAL) & (plan.extents.nbytes > 0)
    for number in np.flatnonzero(may_wait).tolist():
        leaf = leaves[number]
        if _is_known(leaf, late) and (is_on_gpu(leaf) or lies_in_a_row(leaf)):
            name, version = plan.extents.names[number], version_of(leaf)
            found.append(Watched(number=number, name=name, leaf=leaf, version=version))
    return found


def _is_known(leaf: Any, late: set[int] | None) -> bool:
    if isinstance(leaf, np.ndarray):
        return late is None
    # A tensor of inference mode does not count its changes.
    return (late is None or leaf.data_ptr() in late) and not leaf.is_inference()


def _after(event: Any, task: Task) -> None:
    event.synchronize()
    task()
