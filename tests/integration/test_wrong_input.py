"""What a person does wrong: one line with the fix, the right exit code, nothing left or lost."""

import json
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from checkpointing.content import content_sha256
from checkpointing.resolver import list_commits
from checkpointing.store.base import StoreConfig, open_store
from deploy.demo.processes import end_run, kill
from deploy.demo.s3_server import S3Server
from orchestrator.config import RunConfig, load
from orchestrator.core.actions import Outcome, StartRanks
from orchestrator.core.events import DecisionMade
from orchestrator.core.state import State
from orchestrator.errors import EverstepError
from orchestrator.exit_codes import ExitCode
from orchestrator.supervisor.journal import read_records, state_of
from orchestrator.views.replay import replay
from tests.integration.command_line import REPOSITORY, everstep
from tests.integration.traces import memory_of, processes_of, traces

JOBS = Path(__file__).parents[1] / "data"
PATIENCE_S = 60.0
SLEEPS = ["python", "short_job.py", "1"]
CHANCE = re.compile("probe-[0-9a-f]+|request [0-9A-Za-z-]+")  # other at each asking


def write(folder: Path, command: list[str], **tables: Any) -> Path:
    """Write a run file from its tables."""
    path = folder / "run.toml"
    whole: dict[str, dict[str, Any]] = {
        "run": {"name": f"wrong-{secrets.token_hex(4)}"},
        "job": {"command": command, "workdir": str(JOBS), "preload": []},
        "timeouts": {"heartbeat_s": 0.2, "kill_grace_s": 2.0},
    }
    for name, table in tables.items():
        whole[name] = {**whole.get(name, {}), **table}
    lines = []
    for name, table in whole.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    path.write_text("\n".join(lines))
    return path


def line_of(done: "subprocess.CompletedProcess[str]", code: ExitCode) -> str:
    """Return what was said; it must be one line, and nothing on standard output."""
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("everstep: ")
    return lines[0].removeprefix("everstep: ")


def refused(toml: Path, code: ExitCode, env: dict[str, str] | None = None) -> str:
    """Check and run a file that neither takes; return the line, which is the same for both."""
    before = sorted(path for path in toml.parent.rglob("*"))
    checked = line_of(everstep("check", toml, env=env), code)
    line = line_of(everstep("run", toml, "--plain", env=env), code)
    assert CHANCE.sub("", line) == CHANCE.sub("", checked)
    assert sorted(path for path in toml.parent.rglob("*")) == before, "something was left behind"
    if code is not ExitCode.USAGE:
        config = load(toml)
        assert not processes_of(config)
        assert not memory_of(config).exists()
    return line


def test_a_wrong_key_is_named(tmp_path: Path) -> None:
    line = refused(write(tmp_path, SLEEPS, nodes={"cout": 2}), ExitCode.USAGE)
    assert "run.toml: nodes.cout: unknown key" in line


def test_a_missing_run_file_is_named(tmp_path: Path) -> None:
    line = line_of(everstep("run", tmp_path / "no.toml"), ExitCode.NOT_FOUND)
    assert "no.toml: no such file" in line


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    line = refused(write(tmp_path, ["python", "shrot_job.py"]), ExitCode.PRECONDITION)
    assert line.startswith("job.command: no script shrot_job.py")


def test_an_unknown_program_is_named(tmp_path: Path) -> None:
    line = refused(write(tmp_path, ["pyhton", "short_job.py"]), ExitCode.PRECONDITION)
    assert line.startswith("job.command: no program 'pyhton' in PATH")


def test_a_missing_working_directory_is_named(tmp_path: Path) -> None:
    toml = write(tmp_path, SLEEPS, job={"command": SLEEPS, "workdir": "nowhere", "preload": []})
    line = refused(toml, ExitCode.PRECONDITION)
    assert line.startswith(f"job.workdir: no directory {tmp_path / 'nowhere'}")


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(write(tmp_path, SLEEPS, server={"port": port}), ExitCode.PRECONDITION)
    assert line.startswith(f"server.port: cannot listen on 127.0.0.1:{port}")


def test_a_store_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    store = (tmp_path / "nowhere").as_uri()
    line = refused(write(tmp_path, SLEEPS, checkpoint={"store": store}), ExitCode.PRECONDITION)
    assert line.startswith("checkpoint.store: ")
    assert "nowhere" in line


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def bucket(server: S3Server, name: str = "", endpoint: str = "") -> dict[str, str]:
    """The table of a run that saves to the server."""
    return {
        "store": f"s3://{name}" if name else f"{server.store_url}/wrong",
        "endpoint_url": endpoint or server.url,
        "region": "us-east-1",
    }


@pytest.mark.s3
def test_a_missing_bucket_is_named(tmp_path: Path, server: S3Server) -> None:
    toml = write(tmp_path, SLEEPS, checkpoint=bucket(server, "no-such-bucket"))
    line = refused(toml, ExitCode.PRECONDITION, server.environment())
    assert line.startswith("checkpoint.store: ")
    assert "no-such-bucket" in line


@pytest.mark.s3
@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_a_forbidden_bucket_is_named(tmp_path: Path, server: S3Server, wrong: str) -> None:
    env = {
        **server.environment(),
        "AWS_ACCESS_KEY_ID": "nobody" if wrong == "key" else server.access_key,
        "AWS_SECRET_ACCESS_KEY": "guessed" if wrong == "secret" else server.secret_key,
    }
    toml = write(tmp_path, SLEEPS, checkpoint=bucket(server))
    line = refused(toml, ExitCode.PRECONDITION, env)
    assert line.startswith("checkpoint.store: ")
    assert server.bucket in line
    assert server.secret_key not in line


@pytest.mark.s3
def test_missing_credentials_are_told_from_wrong_ones(tmp_path: Path, server: S3Server) -> None:
    env = {**server.environment(), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    env |= {"AWS_CONFIG_FILE": str(tmp_path / "none")}
    toml = write(tmp_path, SLEEPS, checkpoint=bucket(server))
    line = refused(toml, ExitCode.PRECONDITION, env)
    assert line.startswith("checkpoint.store: ")
    assert "credentials" in line


@pytest.mark.s3
def test_an_endpoint_where_nobody_listens_is_named(tmp_path: Path, server: S3Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    toml = write(tmp_path, SLEEPS, checkpoint=bucket(server, endpoint=endpoint))
    line = refused(toml, ExitCode.PRECONDITION, server.environment())
    assert line.startswith("checkpoint.store: ")
    assert endpoint in line


def wait_for(config: RunConfig, what: Callable[[State], object]) -> None:
    """Wait until the journal says something."""
    deadline = time.monotonic() + PATIENCE_S
    path = config.run_dir / "journal.jsonl"
    while not (path.exists() and what(state_of(read_records(path)))):
        assert time.monotonic() < deadline
        time.sleep(0.05)


Begin = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start a supervisor and go on."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(toml: Path, **more: Any) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "run", str(toml), "--plain"],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            **more,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def held(gate: Path) -> list[str]:
    """A job that ends when a test lets it, or by itself in the end."""
    return ["python", "short_job.py", str(PATIENCE_S), str(gate)]


def ends(process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    """Wait for a supervisor's end; return its exit code and what it said."""
    _, said = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said.decode()


@pytest.fixture(autouse=True)
def nothing_is_left_running(tmp_path: Path) -> Iterator[None]:
    """End what a failed test has left."""
    yield
    with suppress(EverstepError):
        config = load(tmp_path / "run.toml")
        for pid in processes_of(config):
            kill(pid)
        end_run(config, None)


def finished_well(config: RunConfig) -> None:
    """Look at everything that a run leaves when it ended well."""
    records = read_records(config.run_dir / "journal.jsonl")
    assert state_of(records).outcome is Outcome.FINISHED
    assert not replay(records).differences
    assert not traces(config)


def notes_of(config: RunConfig) -> list[list[str]]:
    lines = (config.run_dir / "output" / "notes").read_text().splitlines()
    return sorted(line.split()[:3] for line in lines)


ONCE = [["end", "1", "0"], ["start", "1", "0"]]


@pytest.mark.slow
def test_a_run_that_runs_is_not_run_twice_and_not_disturbed(tmp_path: Path, begin: Begin) -> None:
    gate = tmp_path / "gate"
    toml = write(tmp_path, held(gate))
    config = load(toml)
    first = begin(toml)
    wait_for(config, lambda state: state.attempt and state.attempt.started_nodes)
    line = line_of(everstep("run", toml, "--plain"), ExitCode.ALREADY_RUNNING)
    assert f"{config.run.name} is already supervised" in line
    assert str(first.pid) in line
    gate.touch()
    assert ends(first) == (0, "")
    finished_well(config)
    assert notes_of(config) == ONCE

    again = line_of(everstep("run", toml, "--plain"), ExitCode.PRECONDITION)
    assert f"run {config.run.name} is finished; choose another run.name" in again
    assert notes_of(config) == ONCE
    stopped = line_of(everstep("stop", toml), ExitCode.NOT_FOUND)
    assert "no supervisor answers" in stopped
    assert not traces(config)


@pytest.mark.slow
def test_a_token_of_another_run_is_refused_and_disturbs_nobody(
    tmp_path: Path, begin: Begin
) -> None:
    gate = tmp_path / "gate"
    toml = write(tmp_path, held(gate))
    config = load(toml)
    process = begin(toml)
    wait_for(config, lambda state: state.attempt and state.attempt.started_nodes)
    token = config.run_dir / "token"
    right = token.read_text()
    token.write_text("0" * 64)
    for what in ("stop", "snapshot"):
        line = line_of(everstep(what, toml), ExitCode.PRECONDITION)
        assert "token" in line
        assert right not in line
    token.write_text(right)
    gate.touch()
    assert ends(process)[0] == 0
    finished_well(config)
    assert notes_of(config) == ONCE


@pytest.mark.slow
@pytest.mark.parametrize("room", [500, 4_096])
def test_a_full_disk_ends_the_supervisor_and_the_run_goes_on_with_room(
    tmp_path: Path, room: int, begin: Begin
) -> None:
    """A limit on the size of files stands for the disk: only root could make a real small one.

    A page is enough for a rank's slot, and less than the journal of this run.
    """
    toml = write(tmp_path, SLEEPS, nodes={"count": 3, "spares": 1})
    config = load(toml)
    full = begin(toml, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
    code, said = ends(full)
    assert code == ExitCode.PRECONDITION, said
    assert said.startswith("everstep: ")
    assert len(said.splitlines()) == 1
    assert str(config.run_dir) in said
    assert "File too large; " in said
    if room == 500:  # not even the configuration fits: as if nothing had been started
        assert not config.run_dir.exists()
        assert not traces(config)
    assert everstep("run", toml, "--plain").returncode == 0
    finished_well(config)
    assert [word for word, _, _ in notes_of(config)] == ["end"] * 3 + ["start"] * 3


@pytest.mark.slow
def test_a_stopped_run_goes_on_from_its_checkpoint(tmp_path: Path, begin: Begin) -> None:
    steps = 120
    store = tmp_path / "store"
    store.mkdir()
    command = ["python", "short_saving_job.py", str(steps), "0.05"]
    table = {"store": store.as_uri(), "interval_steps": 7, "tune": False}
    toml = write(tmp_path, command, checkpoint=table, nodes={"count": 2})
    config = load(toml)
    process = begin(toml)
    wait_for(config, lambda state: state.best_step >= 3)
    asked = everstep("stop", toml)
    assert asked.returncode == 0, asked.stderr
    code, said = ends(process)
    assert code == ExitCode.STOPPED, said
    records = read_records(config.run_dir / "journal.jsonl")
    stopped = state_of(records)
    assert stopped.outcome is Outcome.STOPPED
    assert not stopped.incidents
    (step, attempt), *_ = stopped.commits
    assert step >= stopped.best_step, "what had been trained was saved"
    assert not traces(config)

    assert everstep("run", toml, "--plain").returncode == 0
    finished_well(config)
    records = read_records(config.run_dir / "journal.jsonl")
    starts = [
        record.event.decision.action
        for record in records
        if isinstance(record.event, DecisionMade)
        and isinstance(record.event.decision.action, StartRanks)
    ]
    assert [(s.attempt, s.restore and s.restore.step) for s in starts] == [(attempt + 1, step)]
    reader = open_store(StoreConfig(url=store.as_uri()))
    commits = [commit.step for commit in list_commits(reader, config.run.name)]
    assert commits[0] == steps
    assert step in commits
    for commit in commits:
        assert content_sha256(reader, config.run.name, commit)["all"]
    words = [word for word, _, _ in notes_of(config)]
    assert (words.count("start"), words.count("stop"), words.count("end")) == (4, 2, 2)


@pytest.mark.slow
def test_an_interrupted_supervisor_says_so_and_leaves_the_ranks_alone(
    tmp_path: Path, begin: Begin
) -> None:
    gate = tmp_path / "gate"
    toml = write(tmp_path, held(gate))
    config = load(toml)
    process = begin(toml)
    wait_for(config, lambda state: state.attempt and state.attempt.started_nodes)
    os.kill(process.pid, signal.SIGINT)
    assert ends(process)[0] == ExitCode.INTERRUPTED
    gate.touch()
    assert everstep("run", toml, "--plain").returncode == 0
    finished_well(config)
    assert notes_of(config) == ONCE
