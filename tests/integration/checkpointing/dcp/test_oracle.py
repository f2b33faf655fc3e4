"""The same saves and loads through the engine and through torch's own files: the same values."""

from pathlib import Path

import pytest

from tests.integration.checkpointing.dcp import cases
from tests.integration.checkpointing.dcp.conftest import MakeRanks
from tests.integration.checkpointing.dcp.states import LAYOUTS

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def both(tmp_path: Path) -> list[tuple[str, str]]:
    return [(engine, str(tmp_path / engine)) for engine in cases.ENGINES]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_comes_back_as_from_torchs_own_files(
    ranks: MakeRanks, tmp_path: Path, layout: str
) -> None:
    job = ranks(4)
    for engine, folder in both(tmp_path):
        saved = job.run(cases.save_training, engine, folder, layout, 1)
        loaded = job.run(cases.load_training, engine, folder, layout)
        assert loaded == saved, engine


def test_a_nested_state_comes_back_as_from_torchs_own_files(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    job = ranks(2)
    for engine, folder in both(tmp_path):
        saved = job.run(cases.save_nested, engine, folder, 3)
        loaded = job.run(cases.load_nested, engine, folder)
        assert loaded == saved, engine


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "fsdp_tp"])
def test_other_worlds_load_what_four_ranks_saved(
    ranks: MakeRanks, tmp_path: Path, layout: str
) -> None:
    for engine, folder in both(tmp_path):
        (saved, *_) = ranks(4).run(cases.save_training, engine, folder, layout, 2)
        assert ranks(2).run(cases.load_training, engine, folder, layout) == [saved] * 2, engine
        assert ranks(1).run(cases.load_training, engine, folder, layout) == [saved], engine


def test_a_world_of_one_and_other_layouts_pass_a_state_around(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    (saved, *_) = ranks(4).run(cases.save_training, "everstep", str(tmp_path / "0"), "fsdp", 2)
    path = [(2, "tp"), (1, "fsdp"), (4, "hsdp"), (2, "plain"), (4, "fsdp_tp")]
    for number, (world, layout) in enumerate(path):
        job, source = ranks(world), str(tmp_path / str(number))
        loaded = job.run(cases.load_training, "everstep", source, layout)
        assert loaded == [saved] * world, layout
        job.run(cases.pass_on, source, str(tmp_path / str(number + 1)), layout)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("drop", "add"),
    [(["scalar", "weights"], []), ([], ["new"]), (["groups"], ["new", "newer"])],
    ids=["missing", "extra", "both"],
)
def test_missing_and_extra_keys_are_treated_as_by_torch(
    ranks: MakeRanks, tmp_path: Path, drop: list[str], add: list[str], partial: bool
) -> None:
    job = ranks(2)
    found = []
    for engine, folder in both(tmp_path):
        job.run(cases.save_nested, engine, folder, 3)
        found.append(job.run(cases.load_subset, engine, folder, drop, add, partial))
    assert found[0] == found[1]
    assert isinstance(found[0][0], dict) == (partial or not add)


@pytest.mark.parametrize("layout", ["hsdp", "tp"])
def test_a_model_is_loaded_alone_and_not_strictly_as_by_torch(
    ranks: MakeRanks, tmp_path: Path, layout: str
) -> None:
    job = ranks(4)
    found = []
    for engine, folder in both(tmp_path):
        (saved, *_) = job.run(cases.save_training, engine, folder, layout, 1)
        (loaded, *_) = job.run(cases.load_model_alone, engine, folder, layout)
        assert loaded.pop("unexpected") == "['added.weight']"
        assert {name.split("/")[1] for name in loaded} == {"model"}
        assert all(saved[name] == sum_ for name, sum_ in loaded.items())
        found.append(loaded)
    assert found[0] == found[1] != {}


@pytest.mark.parametrize("stager", [False, True], ids=["writer", "stager"])
@pytest.mark.parametrize("mode", ["THREAD", "PROCESS"])
def test_a_save_in_the_background_keeps_what_was_there_when_it_began(
    ranks: MakeRanks, tmp_path: Path, mode: str, stager: bool
) -> None:
    # Each mode with another layout; DCP does the same for all of them.
    job, layout = (ranks(4), "fsdp_tp") if mode == "THREAD" else (ranks(2), "fsdp")
    for engine, folder in both(tmp_path):
        if engine == "torch" and stager:
            continue
        saved = job.run(cases.save_async, engine, folder, layout, mode, stager)
        loaded = job.run(cases.load_async, engine, folder, layout)
        assert loaded == saved, engine
