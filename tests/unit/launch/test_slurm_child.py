"""The child that submits a Slurm job, against commands of our own."""

import os
from pathlib import Path

import pytest

from orchestrator.launch import slurm_child
from orchestrator.launch.launcher import AllocationSpec
from orchestrator.launch.slurm import SlurmLauncher
from orchestrator.launch.slurm_child import submit_in_child
from orchestrator.launch.slurm_commands import SlurmRefused, SlurmUnavailable
from orchestrator.launch.slurm_options import SlurmOptions


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    for name, body in bodies.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_no_command_line_shows_what_a_prologue_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    commands(
        tmp_path,
        monkeypatch,
        squeue=f"cat /proc/*/cmdline > {seen} 2>/dev/null; true",
        sbatch=f"cat /proc/*/cmdline >> {seen} 2>/dev/null; echo Submitted batch job 12",
    )
    secret = f"s3cret-{os.getpid()}"
    launcher = SlurmLauncher(tmp_path, SlurmOptions(prologue=(f"export KEY={secret}",)))
    spec = AllocationSpec(key="r/0/launch/1", name="r", nodes=1, gpus_per_node=0, run_dir=tmp_path)
    assert launcher.submit(spec) == "12"
    assert b"orchestrator.launch.submit" in seen.read_bytes()
    assert secret.encode() not in seen.read_bytes()


def test_a_child_that_takes_too_long_is_ended_and_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(slurm_child, "SUBMIT_TIMEOUT_S", 0.5)
    with pytest.raises(SlurmUnavailable, match=r"longer than 0\.5 s"):
        submit_in_child("sleeper", {}, tmp_path / "log")


def test_the_last_thing_that_the_child_says_is_why(tmp_path: Path) -> None:
    with pytest.raises(SlurmRefused, match="No module named nothing_of_this_name"):
        submit_in_child("nothing_of_this_name", {}, tmp_path / "log")
