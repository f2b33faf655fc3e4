"""Takes states apart; of one structure only the first time in full."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpointing import leaves as leaf_bytes
from checkpointing.extents import LOCAL, SHARD
from checkpointing.plan import Plan, make_plan, structure_hash
from checkpointing.stage.meta import MetaText
from checkpointing.stage.recipe import Recipe, values_of
from checkpointing.tree import Flat, flatten

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is remembered of the last structure.

    Attributes:
        recipes: Of the state and of this rank's own.
        order: Which of their leaves belongs to each extent.
        pieces: Which of the extents are pieces of tensors.
    """

    plan: Plan
    recipes: tuple[Recipe, Recipe]
    text: MetaText
    order: tuple[int, ...]
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A state taken apart, not copied: its plain leaves by extent, and its Python values."""

    known: Known
    leaves: list[Any]
    values: list[str]


class Taker:
    """Remembers the last structure of one rank's states.

    Args:
        rank: The rank.
        world: Number of ranks.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._known: Known | None = None

    def take(self, state: State, local: State | None) -> Taken:
        """Take a state and this rank's own apart; nothing is copied but the Python values.

        Raises:
            TypeError: They hold something that cannot be kept exactly.
        """
        if self._known is not None:
            known = self._known
            halves = (known.recipes[0].take(state), known.recipes[1].take(local or {}))
            if halves[0] is not None and halves[1] is not None:
                leaves = halves[0][0] + halves[1][0]
                return _in_order(known, leaves, halves[0][1] + halves[1][1])
        return self._learn(state, local)

    def _learn(self, state: State, local: State | None) -> Taken:
        replica, own = flatten(state), flatten(local or {})
        who, known = (self._rank, self._world), self._known
        if known is not None and known.plan.structure == structure_hash(replica, own, *who):
            plan = known.plan  # other types or devices, in the same places
        else:
            plan = make_plan(replica, own, *who)
        recipes = Recipe(replica), Recipe(own)
        self._known = known = Known(
            plan=plan,
            recipes=recipes,
            text=MetaText(recipes[0].literals, recipes[1].literals, plan.extents),
            order=_order(plan, replica, own),
            pieces=tuple(np.flatnonzero(plan.extents.kind == SHARD).tolist()),
        )
        leaves = [*replica.leaves.values(), *own.leaves.values()]
        return _in_order(known, leaves, values_of(replica.skeleton) + values_of(own.skeleton))


def _order(plan: Plan, replica: Flat, own: Flat) -> tuple[int, ...]:
    """Return the number of each extent's leaf among those of the state and this rank's own."""
    places = dict(zip(replica.leaves, range(len(replica.leaves)), strict=True))
    order = list(map(places.get, plan.extents.names))
    mine = {name: n + len(places) for n, name in enumerate(own.leaves)}
    for number in np.flatnonzero(plan.extents.kind == LOCAL).tolist():
        order[number] = mine[plan.extents.names[number]]
    return tuple(number for number in order if number is not None)


def _in_order(known: Known, leaves: Sequence[Any], values: list[str]) -> Taken:
    ordered = list(map(leaves.__getitem__, known.order))
    for number in known.pieces:
        ordered[number] = leaf_bytes.plain(ordered[number])
    return Taken(known=known, leaves=ordered, values=values)
