"""Fills the memory of a state from the slots and objects that hold a checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import ArenaInvalid, RestoreFailed
from checkpointing.small import Small
from checkpointing.sources import ArenaSource, Part, Wanted, fill_from_store
from checkpointing.stage.arena import MappedArena
from checkpointing.stage.crew import Crew
from checkpointing.store.base import ObjectStore
from checkpointing.targets import Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class ToFill:
    """What is to be filled: extents, parts of some, and small ones by columns."""

    whole: Sequence[Wanted]
    parts: Sequence[Part]
    small: Sequence[Small]

    @classmethod
    def of(cls, found: Sequence[Targets]) -> "ToFill":
        """Return what both halves of a state want."""
        single = [target for targets in found for target in targets.single]
        return cls(
            whole=[wanted for target in single for wanted in target.wanted],
            parts=[part for target in single for part in target.parts],
            small=[targets.small for targets in found],
        )


Fill = Callable[[ToFill], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A checkpoint by name: finished steps and the attempt that staged it."""

    step: int
    attempt: int


def fill_from_memory(source: ArenaSource, crew: Crew, wanted: ToFill) -> None:
    """Fill everything from a slot.

    Raises:
        RestoreFailed: It does not hold all of it, unaltered.
    """
    if wanted.parts:
        name = wanted.parts[0].extent.name
        raise RestoreFailed(f"{name}: not the piece that this rank staged")
    failed = [item.extent.name for item in source.fill(wanted.whole, crew)]
    failed += [
        name for small in wanted.small for name in source.fill_small(small, crew).extents.names
    ]
    if failed:
        raise RestoreFailed(f"{failed[0]}: its bytes in memory fail their CRC")


def fill_from_arena_and_store(
    store: ObjectStore,
    own: Path | MappedArena | None,
    which: tuple[Point, int, int],
    crew: Crew,
    wanted: ToFill,
) -> None:
    """Fill from the own arena what that holds, and the rest from the store.

    Args:
        store: Where all of it is.
        own: The arena.
        which: Checkpoint, rank and world that the slot has to be of.
        crew: The threads that copy from the arena.
        wanted: What to fill.

    Raises:
        CheckpointDamaged: Bytes in the store do not have the CRC that was recorded for them.
        StoreError: The store could not deliver.
    """
    whole, small = wanted.whole, wanted.small
    with opened(own) as arena, suppress(ArenaInvalid):
        source = None if arena is None else _slot(arena, *which)
        if source is not None:
            whole = source.fill(whole, crew)
            small = [source.fill_small(one, crew) for one in small]
    fill_from_store(store, whole, wanted.parts, small)


@contextmanager
def opened(own: Path | MappedArena | None) -> Iterator[MappedArena | None]:
    """Give an arena, mapped for as long as it takes if it is not yet; None when there is none."""
    if own is None or isinstance(own, MappedArena):
        yield own
        return
    try:
        arena = MappedArena(own)
    except (FileNotFoundError, ArenaInvalid):
        yield None
        return
    try:
        yield arena
    finally:
        arena.close()


def whole_slot(arena: MappedArena, point: Point, rank: int, world: int) -> ArenaSource:
    """Return the slot with a checkpoint.

    Raises:
        RestoreFailed: There is none that is whole.
    """
    try:
        source = _slot(arena, point, rank, world)
    except ArenaInvalid as error:
        raise RestoreFailed(str(error)) from error
    if source is None:
        raise RestoreFailed(
            f"the arena of rank {rank} does not hold step {point.step} of attempt "
            f"{point.attempt} whole"
        )
    return source


def _slot(arena: MappedArena, point: Point, rank: int, world: int) -> ArenaSource | None:
    for staged in arena.staged():
        if (staged.step, staged.attempt, staged.rank, staged.world) == (
            point.step,
            point.attempt,
            rank,
            world,
        ):
            return ArenaSource(arena, staged)
    return None
