"""kill -9 of a rank at every line of staging: what is described as whole is whole."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        pytest.param("same", 1, marks=pytest.mark.chaos),
        pytest.param("grows", 1, marks=pytest.mark.chaos),
        ("same", 13),
        ("grows", 17),
    ],
)
def test_a_rank_that_dies_at_any_line_leaves_whole_snapshots_only(kind: str, stride: int) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.faults.dying_ranks", str(folder), kind, str(stride)],
            capture_output=True,
            text=True,
            timeout=500,
        )
    finally:
        shutil.rmtree(folder)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) * stride > 100, "there are so many lines at least"
