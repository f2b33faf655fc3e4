"""Whether a state took what was read for it."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from checkpointing.errors import RestoreFailed
from checkpointing.leaves import crc_of
from checkpointing.stage.crew import Crew, Task
from checkpointing.targets import Targets, as_held, require_same
from checkpointing.tree import Flat


def verify(targets: Targets, flat: Flat, doubted: Collection[str], crew: Crew) -> None:
    """Check what the state made of it: some `load_state_dict` cast, some drop.

    Args:
        targets: What was filled, and summed on its way.
        flat: The state now.
        doubted: What may have changed since; so may leaves that the state made anew.
        crew: The threads that sum.

    Raises:
        RestoreFailed: Something is missing, or not what was read.
    """
    sums: list[Task] = []
    changed: list[str] = []

    def compare(name: str, crc: Callable[[], int], leaf: Any) -> None:
        if crc_of(leaf) != crc():
            changed.append(name)

    def is_as_filled(name: str, filled: Any) -> bool:
        if name not in flat.leaves:
            raise RestoreFailed(f"{name}: was saved, and the state did not take it")
        return flat.leaves[name] is filled and name not in doubted

    for target in targets.single:
        if not is_as_filled(target.name, target.leaf) or target.is_scratch:
            leaf = flat.leaves[target.name]
            require_same(target.name, target.kind, target.like, as_held(leaf))
            sums.append(partial(compare, target.name, target.crc64, leaf))
    for extent, filled in zip(targets.small.extents, targets.small.leaves, strict=True):
        if not is_as_filled(extent.name, filled):
            leaf = flat.leaves[extent.name]
            require_same(extent.name, "tensor", extent, as_held(leaf))
            sums.append(partial(compare, extent.name, partial(int, extent.crc64), leaf))
    crew.run(sums)
    if changed:
        raise RestoreFailed(f"{min(changed)}: the state changed it while taking it")


def overlapping(halves: Sequence[Targets]) -> list[set[str]]:
    """Return by half what has memory in common with another: one may have overwritten it."""
    spans: list[tuple[int, int, int, str]] = []
    for half, targets in enumerate(halves):
        sizes, names = targets.small.extents.nbytes.tolist(), targets.small.extents.names
        small = zip(targets.small.addresses, sizes, names, strict=True)
        spans += [(begin, nbytes, half, name) for begin, nbytes, name in small]
        spans += [
            (int(t.out.ctypes.data), t.out.nbytes, half, t.name)
            for t in targets.single
            if t.out.nbytes
        ]
    spans.sort()
    found: list[set[str]] = [set() for _ in halves]
    end, last = 0, (0, "")
    for begin, nbytes, half, name in spans:
        if begin < end:
            found[half].add(name)
            found[last[0]].add(last[1])
        if begin + nbytes > end:
            end, last = begin + nbytes, (half, name)
    return found
