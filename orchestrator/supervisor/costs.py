"""What saves cost, kept until their commit: the journal gets the sum, not the part of each rank."""

from collections import OrderedDict
from dataclasses import replace
from typing import Final

from orchestrator.core.events import ShardUploaded
from orchestrator.core.saves import NAN, SaveCost, ShardCost, slowest, together
from orchestrator.core.state import State
from orchestrator.wire import FactEvent

KEPT: Final = 16
"""Saves that wait for their commit; of older ones it is not known what they cost."""

Key = tuple[int, int]


class SaveCosts:
    """The costs that agents told of, by step and attempt.

    A supervisor that takes over does not know them: what it commits first is not measured.
    """

    def __init__(self) -> None:
        self._told: OrderedDict[Key, dict[int, ShardCost]] = OrderedDict()

    def keep(self, event: FactEvent) -> FactEvent:
        """Take the cost out of a report, and return what goes to the journal."""
        if not isinstance(event, ShardUploaded) or event.cost is None:
            return event
        self._told.setdefault((event.step, event.attempt), {})[event.rank] = event.cost
        while len(self._told) > KEPT:
            self._told.popitem(last=False)
        return replace(event, cost=None)

    def of(self, key: Key, state: State, now: float) -> SaveCost:
        """Sum up what a save cost whose parts are all in the store, by step and attempt."""
        shards = state.uploads.get(key, {}).values()
        return together(
            self._told.get(key, {}).values(),
            upload_s=slowest(shard.upload_s for shard in shards),
            age_s=now - state.committed_at if state.committed_at else NAN,
        )
