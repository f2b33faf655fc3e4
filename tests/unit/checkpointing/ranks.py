"""A rank without an agent: its slot, its arena and its environment."""

import json
from pathlib import Path

from checkpointing import slot
from checkpointing.slot import Control, SlotReading, SlotView
from checkpointing.stage.arena import MappedArena, UploadState, peek
from checkpointing.store.base import StoreConfig


class Rank:
    """Rank 0 of 1, in a folder of its own."""

    def __init__(self, folder: Path, interval: int = 1) -> None:
        self.slot, self.arena = folder / "slot-0", folder / "arena-0"
        slot.create(self.slot)
        self.view = SlotView(self.slot)
        self.view.set_control(Control(interval_steps=interval))
        self.store = StoreConfig(url=(folder / "store").as_uri())

    def environ(self, attempt: int = 1, restore: object = None, **more: str) -> dict[str, str]:
        return {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "EVERSTEP_RUN": "r",
            "EVERSTEP_ATTEMPT": str(attempt),
            "EVERSTEP_SLOT": str(self.slot),
            "EVERSTEP_ARENA": str(self.arena),
            "EVERSTEP_STORE": self.store.to_json(),
            "EVERSTEP_RESTORE": json.dumps(restore),
            **more,
        }

    def reading(self) -> SlotReading:
        reading = self.view.read()
        assert reading is not None
        return reading

    def steps(self) -> list[int]:
        return [staged.step for staged in peek(self.arena)]

    def mark(self, state: UploadState, *steps: int) -> None:
        arena = MappedArena(self.arena)
        for staged in arena.staged():
            if not steps or staged.step in steps:
                arena.headers[staged.index].mark(staged.sequence, state)
        arena.close()

    def from_memory(self, step: int) -> dict[str, str]:
        spec = {"step": step, "attempt": 1, "source": "memory"}
        return self.environ(attempt=2, restore=spec)
