"""Where a snapshot is to be kept, and which of the saves goes where. Pure."""

from dataclasses import dataclass
from enum import IntFlag
from typing import Final


class Tier(IntFlag):
    """The places of a snapshot, the nearest first; a set of them stands in a slot's header."""

    MEMORY = 1  # the rank's own arena, where every snapshot begins
    PEER = 2  # the memory of another node
    DISK = 4  # a disk of the own node
    STORE = 8


EVERYWHERE: Final = Tier.MEMORY | Tier.PEER | Tier.DISK | Tier.STORE
NOWHERE: Final = Tier(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How often snapshots go to each tier but the store, whose interval is tuned.

    Attributes:
        memory: Save at least every so many steps; 0: when the store's turn comes.
        peer: The same for a copy in another node's memory; 0: none, 1: every save.
        disk: The same for a copy on the node's disk.
    """

    memory: int = 0
    peer: int = 0
    disk: int = 0


def due(step: int, store_steps: int, rhythm: Rhythm) -> Tier:
    """Return where the regular save after `step` goes, `NOWHERE` when there is none.

    Saves are made at the multiples of the shortest of memory's and the store's interval. Any other
    tier gets the first save at or after each multiple of its own. That follows from the arguments
    alone, so all ranks agree, also after a restart.

    Args:
        step: Number of finished steps.
        store_steps: The store's interval in force; 0 means no saves.
        rhythm: The other tiers'.
    """
    every = min(rhythm.memory or store_steps, store_steps)
    if every <= 0 or step <= 0 or step % every:
        return NOWHERE
    tiers = Tier.MEMORY
    for tier, steps in (
        (Tier.PEER, rhythm.peer),
        (Tier.DISK, rhythm.disk),
        (Tier.STORE, store_steps),
    ):
        if steps > 0 and step % steps < every:
            tiers |= tier
    return tiers
