"""Folders of trainers that have their own format: kept whole, found again, and fetched."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from checkpointing.dcp import EverstepWriter, fetch, find_checkpoints, keep
from checkpointing.errors import RestoreFailed, StoreMissing
from tests.integration.checkpointing.dcp import cases
from tests.integration.checkpointing.dcp.conftest import MakeRanks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoint-20"
    (made / "deep" / "er").mkdir(parents=True)
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 300)
    (made / "deep" / "er" / "rng state (1).pth").write_bytes(b"x")
    (made / "empty").touch()
    return made


def content(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_a_folder_comes_back_byte_by_byte(tmp_path: Path, folder: Path) -> None:
    keep(folder, tmp_path / "kept")
    found = fetch(tmp_path / "kept", tmp_path / "new" / "checkpoint-20")
    assert content(found) == content(folder)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["checkpoint-20"]


def test_a_single_file_comes_back_as_one(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"state")
    keep(tmp_path / "last.ckpt", tmp_path / "kept")
    assert fetch(tmp_path / "kept", tmp_path / "again.ckpt").read_bytes() == b"state"


def test_ranks_with_folders_of_their_own_keep_them_together(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    ranks(2).run(cases.keep_own_folder, str(tmp_path))
    found = fetch(tmp_path / "kept", tmp_path / "new")
    assert content(found) == {"shared": b"all", "rank-0": b"0", "rank-1": b"1"}


def test_a_spoilt_folder_does_not_appear(tmp_path: Path, folder: Path) -> None:
    keep(folder, tmp_path / "kept")
    (data,) = (tmp_path / "kept").glob("data/*/*.bin")
    raw = bytearray(data.read_bytes())
    raw[500] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CheckpointException, match=r"model\.safetensors: its bytes"):
        fetch(tmp_path / "kept", tmp_path / "new" / "checkpoint-20")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "./x", "a/../../x"])
def test_a_hostile_name_writes_nothing_elsewhere(tmp_path: Path, name: str) -> None:
    writer = EverstepWriter(tmp_path / "kept")
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {name: torch.ones(3, dtype=torch.uint8)}
    dcp.save(state, storage_writer=writer, planner=planner)
    with pytest.raises(RestoreFailed, match="is no file"):
        fetch(tmp_path / "kept", tmp_path / "new" / "deep")
    assert not list(tmp_path.rglob("x"))


def test_what_is_taken_or_absent_is_said(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file to keep"):
        keep(tmp_path / "nothing", tmp_path / "kept")
    keep(folder, tmp_path / "kept")
    with pytest.raises(FileExistsError):
        fetch(tmp_path / "kept", folder)


def test_checkpoints_are_found_in_order_of_their_steps(tmp_path: Path) -> None:
    base = tmp_path / "run"
    for name in ("step-100", "step-20", "best", "deep/step-9"):
        dcp.save({"n": name}, storage_writer=EverstepWriter(base), checkpoint_id=name)
    (base / "step-300" / "data").mkdir(parents=True)  # never committed
    found = [url.removeprefix(f"{base.as_uri()}/") for url in find_checkpoints(base)]
    assert found == ["best", "deep/step-9", "step-20", "step-100"]
    with pytest.raises(StoreMissing):
        find_checkpoints(tmp_path / "mistyped")
