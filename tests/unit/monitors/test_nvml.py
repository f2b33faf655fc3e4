from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("standin_nvml.c")

# Run in a process of its own: a library is loaded once for the life of a process.
READ = """
import dataclasses, json, sys
from monitors.gpu.nvml import NvmlProbe
now = [0.0]
probe = NvmlProbe(clock=lambda: 7.0, monotonic=lambda: now[0], timeout_s=float(sys.argv[1]))
def told(o): return [type(o).__name__, getattr(o, "value", None), getattr(o, "why", None)]
def row(g):
    names = [f.name for f in dataclasses.fields(g)][2:]
    return {"index": g.index, "uuid": g.uuid, **{n: told(getattr(g, n)) for n in names}}
out = []
for moment in json.loads(sys.argv[2]):
    now[0] = moment
    out.append({"gpus": [row(g) for g in probe.read()], "driver": told(probe.driver)})
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is missing: the stand-in for libnvidia-ml.so.1 cannot be built")
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(target), str(SOURCE)],
        check=True,
        timeout=60,
    )
    return folder


def read(
    folder: Path, *, mode: str = "", timeout_s: float = 5.0, moments: tuple[float, ...] = (0.0,)
) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", READ, str(timeout_s), json.dumps(moments)],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), "STANDIN_NVML": mode},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def test_a_healthy_gpu_is_read_in_base_units(library: Path) -> None:
    (answer,) = read(library)
    well = answer["gpus"][0]
    assert answer["driver"][:2] == ["Ok", "580.95.05"]
    assert well["uuid"] == "GPU-well"
    assert well["busy_ratio"][:2] == ["Ok", 0.87]
    assert well["memory_used_bytes"][:2] == ["Ok", float(77 << 30)]
    assert well["memory_total_bytes"][:2] == ["Ok", float(80 << 30)]
    assert well["power_watts"][:2] == ["Ok", 412.5]
    assert well["temperature_celsius"][:2] == ["Ok", 61.0]


def test_a_lost_gpu_is_unknown_and_does_not_hide_the_others(library: Path) -> None:
    (answer,) = read(library)
    lost = answer["gpus"][1]
    for field in ("busy_ratio", "memory_used_bytes", "power_watts", "temperature_celsius"):
        assert lost[field] == ["Unknown", None, "GPU is lost"]


def test_a_library_without_its_kernel_module_is_not_measured(library: Path) -> None:
    (answer,) = read(library, mode="no_module")
    assert answer["gpus"] == []
    assert answer["driver"][0] == "NotMeasured"


def test_a_driver_that_never_returns_is_unknown_and_read_does_not_wait(library: Path) -> None:
    answers = read(library, mode="hang", timeout_s=0.2, moments=(0.0, 1.0))
    assert [a["driver"][0] for a in answers] == ["Unknown", "Unknown"]
    assert "did not answer" in answers[1]["driver"][2]


def test_a_machine_without_the_library_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    (answer,) = read(tmp_path)
    assert answer["gpus"] == []
    assert answer["driver"][0] == "NotMeasured"


def test_a_missing_driver_is_looked_for_once_a_minute(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    from monitors.gpu.nvml import NvmlProbe

    calls = []

    def init() -> None:
        calls.append(1)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    now = [0.0]
    probe = NvmlProbe(monotonic=lambda: now[0])
    for moment in (0.0, 1.0, 59.0, 61.0, 62.0):
        now[0] = moment
        assert probe.read() == ()
    assert len(calls) == 2
