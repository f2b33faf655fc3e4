"""A sharded training kept by the engine itself: any world restores what any other saved."""

from pathlib import Path

import pytest

from tests.integration.checkpointing.dcp import engine_cases as cases
from tests.integration.checkpointing.dcp.conftest import MakeRanks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


@pytest.mark.parametrize("steps", [0, 1], ids=["not begun", "other"])
@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "fsdp_tp", "tp", "plain"])
def test_two_and_eight_ranks_restore_what_four_saved(
    ranks: MakeRanks, tmp_path: Path, layout: str, steps: int
) -> None:
    (saved, *_) = ranks(4).run(cases.save_training, str(tmp_path), layout)
    for world in (4, 2, 8, 1):
        found = ranks(world).run(cases.restore_training, str(tmp_path), layout, steps)
        assert found == [saved] * world, world


def test_other_layouts_restore_it_as_well(ranks: MakeRanks, tmp_path: Path) -> None:
    (saved, *_) = ranks(4).run(cases.save_training, str(tmp_path), "fsdp")
    for world, layout in ((2, "tp"), (4, "hsdp"), (4, "fsdp_tp"), (2, "plain"), (8, "fsdp")):
        found = ranks(world).run(cases.restore_training, str(tmp_path), layout, 1)
        assert found == [saved] * world, layout


def test_a_restored_training_goes_the_same_way_on(ranks: MakeRanks, tmp_path: Path) -> None:
    for straight, resumed in ranks(4).run(cases.train_on, str(tmp_path), "fsdp"):
        assert straight == resumed


def test_a_rank_restores_its_pieces_from_its_own_arena(ranks: MakeRanks, tmp_path: Path) -> None:
    for saved, restored in ranks(4).run(cases.restore_from_arena, str(tmp_path), "hsdp"):
        assert saved == restored


PLANS = [[], ["0"], ["1"], ["R", "0"], ["0", "1"], ["1", "0"], ["R", "R"], ["0", "0"]]


PAIRS = [pytest.param(plan, PLANS, id=f"{plan}-all", marks=pytest.mark.chaos) for plan in PLANS] + [
    pytest.param(plan, [PLANS[(n + far) % len(PLANS)] for far in (1, 3)], id=str(plan))
    for n, plan in enumerate(PLANS)
]
"""Each plan with all others, and with two of them, so that each is also restored into twice."""


@pytest.mark.parametrize(("plan", "others"), PAIRS)
def test_tensors_of_odd_shapes_change_layout_and_world(
    ranks: MakeRanks, tmp_path: Path, plan: list[str], others: list[list[str]]
) -> None:
    ranks(4).run(cases.save_spread, str(tmp_path), plan)
    for other in others:
        ranks(4).run(cases.restore_spread, str(tmp_path), other)
    ranks(2).run(cases.restore_spread, str(tmp_path), ["1"])
    ranks(8).run(cases.restore_spread, str(tmp_path), ["0", "1"])


def test_ranks_outside_a_mesh_have_nothing_of_its_tensors(ranks: MakeRanks, tmp_path: Path) -> None:
    found = ranks(4).run(cases.restore_on_some, str(tmp_path))
    assert [text for (text,) in found] == [
        "[]",
        str([float(n) for n in range(6)]),
        str([float(n) for n in range(6, 12)]),
        "[]",
    ]
