import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from monitors.gpu.readings import GpuReading, unanswered
from monitors.observations import Ok, Unknown
from orchestrator.agent import fitness
from orchestrator.agent.fitness import Fitness, problem
from orchestrator.config import RunConfig, parse


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def run_config(tmp_path: Path, **nodes: Any) -> RunConfig:
    value = {
        "run": {"name": "small", "dir": str(tmp_path)},
        "job": {"command": ["true"], "workdir": str(tmp_path)},
        "nodes": {"memory_dir": str(tmp_path), **nodes},
    }
    return parse(value, "run.toml")


def gpu(index: int) -> GpuReading:
    value = Ok(value=80e9, source="nvml", at=1.0)
    return GpuReading(
        index=index,
        uuid=f"GPU-{index}",
        busy_ratio=value,
        memory_used_bytes=value,
        memory_total_bytes=value,
        power_watts=value,
        temperature_celsius=value,
    )


LOST = unanswered(7, "GPU-7", Unknown(why="GPU is lost", source="nvml", at=1.0))


def test_nothing_speaks_against_a_healthy_node(tmp_path: Path) -> None:
    assert problem(run_config(tmp_path), ()) == ""


def test_a_working_directory_that_is_not_mounted_is_told(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    (tmp_path / "gone").mkdir()
    job = config.job.model_copy(update={"workdir": tmp_path / "gone"})
    config = config.model_copy(update={"job": job})
    assert problem(config, ()) == ""
    (tmp_path / "gone").rmdir()
    assert "job.workdir" in problem(config, ())


def test_too_little_memory_is_told_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = Usage(100 << 20, 95 << 20, 5 << 20)
    monkeypatch.setattr(fitness.shutil, "disk_usage", lambda _: usage)
    assert problem(run_config(tmp_path), ()).startswith("only 5 MiB free")


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((), ""),
        ((gpu(0), gpu(1)), ""),
        ((gpu(0), gpu(1), gpu(2)), ""),
        ((gpu(0),), "1 of 2 GPUs answer (nodes.gpus_per_node)"),
        ((gpu(0), LOST), "1 of 2 GPUs answer (nodes.gpus_per_node)"),
    ],
)
def test_gpus_that_do_not_answer_are_counted(
    tmp_path: Path, gpus: tuple[GpuReading, ...], expected: str
) -> None:
    assert problem(run_config(tmp_path, gpus_per_node=2), gpus) == expected


def test_a_run_without_gpus_does_not_count_them(tmp_path: Path) -> None:
    assert problem(run_config(tmp_path), (LOST,)) == ""


def test_a_look_that_hangs_is_a_finding_and_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitness, "LOOK_TIMEOUT_S", 0.05)
    begun: list[int] = []

    async def main() -> None:
        gate = asyncio.Event()

        async def read_gpus() -> Sequence[GpuReading]:
            begun.append(1)
            await gate.wait()
            return ()

        looks = Fitness(run_config(tmp_path), read_gpus)
        assert "takes longer" in await looks.look()
        assert "takes longer" in await looks.look()
        gate.set()
        assert await looks.look() == ""
        assert len(begun) == 1

    asyncio.run(main())
