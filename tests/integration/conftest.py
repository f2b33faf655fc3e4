"""Runs of the real thing for integration tests: the command line, real processes, real signals."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.demo.run import Run

TOML = """\
[run]
name = "{name}"

[job]
command = {command}
workdir = "{workdir}"
{job}

[nodes]
count = {nodes}
spares = {spares}
ranks_per_node = {ranks}

[checkpoint]
{store}
interval_steps = {interval}
tune = false
{checkpoint}

[timeouts]
heartbeat_s = 0.2
agent_lost_s = 10.0
step_s = {step_s}
init_s = 120.0
kill_grace_s = 2.0
launch_s = 60.0
"""

MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """Write a run file and return its run, not started; leave nothing behind."""
    yield from _maker(tmp_path)


@pytest.fixture(scope="module")
def make_module_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeRun]:
    """As `make_run`, for a run that several tests of a module look at."""
    yield from _maker(tmp_path_factory.mktemp("runs"))


def _maker(folder: Path) -> Iterator[MakeRun]:
    runs: list[Run] = []

    def make(
        name: str,
        command: list[str],
        *,
        nodes: int = 2,
        spares: int = 1,
        ranks: int = 2,
        interval: int = 10,
        step_s: float = 60.0,
        store: Path | None = None,
        workdir: Path | None = None,
        job: str = "",
        checkpoint: str = "",
        env: dict[str, str] | None = None,
    ) -> Run:
        toml = folder / f"{name}.toml"
        if store is not None:
            store.mkdir(exist_ok=True)
        toml.write_text(
            TOML.format(
                name=name,
                command=json.dumps(command),
                workdir=workdir or Path.cwd(),
                nodes=nodes,
                spares=spares,
                ranks=ranks,
                interval=interval,
                step_s=step_s,
                job=job,
                checkpoint=checkpoint,
                store=f'store = "file://{store}"' if store else "",
            ),
            encoding="utf-8",
        )
        run = Run(toml, env or {}, lambda _: None)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.close()
