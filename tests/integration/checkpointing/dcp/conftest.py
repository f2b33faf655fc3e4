import multiprocessing.forkserver
from collections.abc import Callable, Iterator

import pytest

from tests.integration.checkpointing.dcp.ranks import Ranks

MakeRanks = Callable[[int], Ranks]


@pytest.fixture(scope="session")
def ranks() -> Iterator[MakeRanks]:
    """A job of so many ranks, a new one when a test broke the last."""
    made: dict[int, Ranks] = {}

    def make(world: int) -> Ranks:
        if world not in made or made[world].broken:
            if world in made:
                made[world].close()
            made[world] = Ranks(world)
        return made[world]

    yield make
    for found in made.values():
        found.close()
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]
