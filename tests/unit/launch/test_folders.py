"""The folders of a run's allocations."""

from pathlib import Path

import pytest

from orchestrator.launch.folders import folder_of, folders_in, note_of, slug, write_note
from orchestrator.launch.launcher import AllocationSpec


def test_a_folder_is_named_after_its_key_without_what_shells_and_sbatch_treat_specially() -> None:
    assert slug("my-run.2/0/launch/1") == "my-run.2-0-launch-1"
    assert slug("a b%j/$x;1") == "a-b-j-x-1"
    spec = AllocationSpec(
        key="r/3/launch/12", name="r", nodes=1, gpus_per_node=0, run_dir=Path("/runs/r")
    )
    assert folder_of(spec) == Path("/runs/r/submitit/r-3-launch-12")


def test_what_is_noted_is_read_again_and_nothing_is_no_error(tmp_path: Path) -> None:
    assert folders_in(tmp_path) == ()
    folder = tmp_path / "submitit" / "r-0-launch-1"
    folder.mkdir(parents=True)
    assert note_of(folder) == {}
    write_note(folder, {"job": "7"})
    assert note_of(folder) == {"job": "7"}
    (tmp_path / "submitit" / "lock").touch()
    assert folders_in(tmp_path) == (folder,)


def test_a_note_that_is_no_object_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("[]")
    with pytest.raises(ValueError, match="no JSON object"):
        note_of(tmp_path)
