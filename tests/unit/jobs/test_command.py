import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[3]


def moe(*flags, folder, **environ):
    return subprocess.run(
        [sys.executable, "-m", "jobs.moe", *flags],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_single_process_without_environment_trains_and_leaves_its_files(tmp_path):
    done = moe("--preset", "tiny", "--steps", "3", "--plain", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    final = json.loads((tmp_path / "moe-out" / "final.json").read_text())
    assert final["steps"] == 3
    assert final["tokens"] == 3 * 2 * 32
    assert all(len(value) == 64 for value in final["sha256"].values())
    lines = (tmp_path / "moe-out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", "nowhere.txt"], "no such file"),
        (["--data", "empty.txt"], "is empty"),
        (["--data", "short.txt"], "give more data"),
        (["--backend", "nccl", "--preset", "tiny"], "no CUDA GPU"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tmp_path, flags, said):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    done = moe(*flags, folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "moe-out").exists()


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--lr", "nan"], ["--preset", "huge"]])
def test_wrong_flags_are_exit_code_2(tmp_path, flags):
    done = moe(*flags, folder=tmp_path)
    assert done.returncode == 2
    assert flags[0] in done.stderr.splitlines()[-1]


def test_wrong_data_is_told_without_loading_torch(tmp_path):
    code = (
        "import sys; from jobs.moe.__main__ import main; code = main(['--data', 'nowhere']); "
        "assert code == 2 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_diverging_run_stops_with_exit_code_3_and_a_clear_line(tmp_path):
    flags = ["--preset", "tiny", "--steps", "40", "--lr", "1e30", "--plain"]
    done = moe(*flags, folder=tmp_path)
    assert done.returncode == 3
    assert "not finite" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "moe-out" / "final.json").exists()


def test_training_step_does_not_load_the_compiler(tmp_path):
    code = (
        "import sys; from jobs.moe.__main__ import main; "
        "assert main(['--preset', 'tiny', '--steps', '2']) == 0; "
        "assert not {'torch._dynamo', 'torch._inductor'} & set(sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, timeout=60)
