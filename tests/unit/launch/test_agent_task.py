"""How an agent on a Slurm node learns who and where it is, and whether it is wanted."""

import json
import multiprocessing
import socket
from pathlib import Path

import pytest

from orchestrator.agent import task


def note(run_dir: Path, job: str) -> None:
    folder = run_dir / "submitit" / f"r-{job}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps({"job": job, "key": f"r/{job}"}))


def test_every_job_that_was_noted_is_wanted_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "NOTED_S", 0.3)
    assert not task._is_wanted(tmp_path, "7")
    note(tmp_path, "8")
    assert not task._is_wanted(tmp_path, "7")
    (tmp_path / "submitit" / "r-8" / "job.json").write_text("{")
    (tmp_path / "submitit" / "r-6").mkdir()
    note(tmp_path, "7")
    note(tmp_path, "9")
    assert task._is_wanted(tmp_path, "7")
    assert task._is_wanted(tmp_path, "9")


def test_a_task_of_this_machine_has_the_name_that_its_allocation_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "submitit" / "r-2").mkdir(parents=True)
    (tmp_path / "submitit" / "r-2" / "nodes.json").write_text('["node3", "node5"]')
    monkeypatch.setenv("SUBMITIT_LOCAL_GLOBALID", "1")
    assert task._local_node(tmp_path, "r-2") == "node5"


def test_a_job_that_is_not_wanted_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "NOTED_S", 0.0)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    process = multiprocessing.get_context("fork").Process(
        target=task.run_agent, args=(str(tmp_path),)
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_address_is_the_one_on_the_way_to_the_supervisor(tmp_path: Path, host: str) -> None:
    if "::" in host and not socket.has_ipv6:
        pytest.skip("no IPv6")
    (tmp_path / "supervisor.json").write_text(json.dumps({"url": f"http://{host}:8080"}))
    assert task._own_address(tmp_path) == host.strip("[]")
