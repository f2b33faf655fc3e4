"""Checkpoints move between torch's own files, DCP through the engine, and runs of the engine."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointing.content import content_sha256
from checkpointing.dcp import EverstepReader, EverstepWriter
from checkpointing.dcp.migrate import main
from checkpointing.restore import Point, restore_from_store
from checkpointing.store.directory import DirectoryStore
from tests.integration.checkpointing.dcp import cases, engine_cases
from tests.integration.checkpointing.dcp.conftest import MakeRanks
from tests.integration.checkpointing.dcp.states import blank, nested, sums

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

UNKEPT = ("blob", "pair")
"""What the engine keeps otherwise: a BytesIO as its bytes, tensors in tuples not at all."""


def plain(seed: int) -> dict[str, Any]:
    return {key: value for key, value in nested(seed).items() if key not in UNKEPT}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


def migrate(source: Path | str, store: Path, *more: str) -> int:
    return main([str(source), "--store", store.as_uri(), "--run", "mine", *more])


def restored(store: Path, step: int, state: dict[str, Any]) -> dict[str, Any]:
    point = Point(step=step, attempt=1)
    restore_from_store(DirectoryStore(store), "mine", point, 0, 1, state, None)
    return state


def test_a_folder_of_torchs_is_taken_over(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = plain(3)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "step-120"))
    monkeypatch.setattr("checkpointing.dcp.migrate._BATCH", 300)  # several objects
    assert migrate(tmp_path / "step-120", store, "--trust-pickle") == 0
    assert capsys.readouterr().out.startswith("step 120 of mine: ")
    assert len(list(store.glob("mine/data/*/*/rank-*.bin"))) == 3
    assert sums(restored(store, 120, blank(plain(1)))) == sums(state)
    assert migrate(tmp_path / "step-120", store, "--trust-pickle") == 0  # again: the same


def test_it_is_not_unpickled_without_consent(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    source = tmp_path / "step-1"
    source.mkdir()
    (source / ".metadata").write_bytes(pickle.dumps(Bomb()))
    assert migrate(source, store) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "is pickle" in line
    assert "--trust-pickle" in line
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "fsdp_tp"])
def test_a_sharded_training_of_torchs_goes_on_in_a_run(
    ranks: MakeRanks, tmp_path: Path, store: Path, layout: str
) -> None:
    folder = tmp_path / "7"
    (saved, *_) = ranks(4).run(cases.save_training, "torch", str(folder), layout, 2)
    assert migrate(folder, store, "--trust-pickle") == 0
    for world, other in ((2, "fsdp"), (1, "plain"), (4, layout)):
        found = ranks(world).run(cases.restore_run, str(store), "mine", 7, other)
        assert found == [saved] * world


def test_a_save_through_the_engine_is_taken_over_without_pickle(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = plain(3)
    dcp.save(state, storage_writer=EverstepWriter(tmp_path / "a-50"))
    assert migrate((tmp_path / "a-50").as_uri(), store) == 0
    assert sums(restored(store, 50, blank(plain(1)))) == sums(state)
    assert migrate((tmp_path / "a-50").as_uri(), store, "--step", "9", "--leave-out", "tie") == 0
    left = {key: value for key, value in plain(1).items() if key != "ties"}
    assert sums(restored(store, 9, blank(left))).items() < sums(state).items()
    whole = content_sha256(DirectoryStore(store), "mine", 50)
    part = content_sha256(DirectoryStore(store), "mine", 9)
    assert whole["all"] != part["all"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--step", "1"], "no checkpoint"),
        (["nowhere"], "tells no step"),
        (["pairs-3"], "a tensor inside"),
    ],
)
def test_what_cannot_be_taken_over_is_one_line(
    tmp_path: Path,
    store: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    dcp.save({"pair": (torch.ones(2), 1)}, storage_writer=EverstepWriter(tmp_path / "pairs-3"))
    source, *more = arguments
    assert migrate((tmp_path / source).as_uri(), store, *more) == 1
    found = capsys.readouterr().err
    assert words in found
    assert found.count("\n") == 1


def test_the_command_runs_by_itself(tmp_path: Path, store: Path) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "step-5"))
    command = [sys.executable, "-m", "checkpointing.dcp.migrate", str(tmp_path / "step-5")]
    command += ["--store", store.as_uri(), "--run", "mine", "--trust-pickle"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert restored(store, 5, {"a": torch.zeros(2)})["a"].tolist() == [1.0, 1.0]


def test_dcp_loads_a_checkpoint_of_a_run(ranks: MakeRanks, store: Path) -> None:
    (saved, *_) = ranks(4).run(engine_cases.save_state_dicts, str(store), "fsdp")
    for world, layout in ((4, "fsdp"), (2, "tp"), (1, "plain")):
        found = ranks(world).run(cases.load_run, str(store), engine_cases.RUN, layout)
        assert found == [saved] * world


def test_a_run_is_read_by_its_newest_step_or_the_one_asked_for(tmp_path: Path, store: Path) -> None:
    for step in (10, 20):
        dcp.save({"n": step}, storage_writer=EverstepWriter(tmp_path / str(step)))
        assert migrate((tmp_path / str(step)).as_uri(), store) == 0
    for step, wanted in ((None, 20), (10, 10)):
        state = {"n": 0}
        dcp.load(state, storage_reader=EverstepReader(store, run="mine", step=step))
        assert state["n"] == wanted
