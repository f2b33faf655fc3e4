"""What the saves of a node's ranks cost, read from their slots before later saves come."""

from collections import OrderedDict
from dataclasses import replace
from typing import Final

from checkpointing.slot import SlotReading
from orchestrator.core.events import ShardUploaded
from orchestrator.core.saves import ShardCost

KEPT: Final = 4
"""Saves that are remembered of each rank: two slots, and a bit of patience."""

Key = tuple[int, int]


class Saves:
    """The latest saves of each rank, by attempt and step."""

    def __init__(self) -> None:
        self._known: dict[int, OrderedDict[Key, SlotReading]] = {}

    def note(self, rank: int, attempt: int, reading: SlotReading) -> None:
        """Take what a slot says; of a copy beside training that is complete only later."""
        if reading.saved_step < 0:
            return
        known = self._known.setdefault(rank, OrderedDict())
        known[attempt, reading.saved_step] = reading
        while len(known) > KEPT:
            known.popitem(last=False)

    def add_to(self, event: ShardUploaded) -> ShardUploaded:
        """Return a report of an upload with what staging its bytes took, as far as is known."""
        reading = self._of(event.rank, (event.attempt, event.step))
        if reading is None:
            return event
        cost = replace(
            event.cost or ShardCost(),
            stall_s=reading.stall_s,
            stage_s=reading.stage_s,
            staged_nbytes=reading.staged_nbytes,
            tokens=reading.saved_tokens,
        )
        return replace(event, cost=cost)

    def _of(self, rank: int, key: Key) -> SlotReading | None:
        known = self._known.get(rank)
        return known.get(key) if known is not None else None
