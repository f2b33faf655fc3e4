"""The demo and its S3 server, ended by real signals: nothing that they started is left."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.demo.processes import descendants, end_run, is_alive
from orchestrator.config import load
from tests.integration.command_line import REPOSITORY

PATIENCE_S = 120.0
SERVER = """
import sys, time
from pathlib import Path
from deploy.demo.s3_server import S3Server
with S3Server(Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_s3_server_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        assert is_alive(server)
        process.kill()
    wait_until(lambda: not is_alive(server))


@contextmanager
def demo(out: Path, agent_count: int) -> Iterator[subprocess.Popen[str]]:
    """Start a demo and wait for its supervisor and agents; end what it leaves."""
    command = [sys.executable, "-m", "deploy.demo", "--plain", "--out", str(out)]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: len(children(process.pid)) == 2)  # server and supervisor
            wait_until(lambda: len(agents(out)) >= agent_count)
            yield process
        finally:
            process.kill()
            if (out / "broken.toml").exists():
                end_run(load(out / "broken.toml"), None)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def agents(out: Path) -> tuple[int, ...]:
    announced = (out / "runs" / "broken" / "nodes").glob("*/agent.json")
    return tuple(int(json.loads(path.read_text("utf-8"))["pid"]) for path in announced)


def test_a_demo_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    with demo(tmp_path / "out", 1) as process:
        there = (process.pid, *agents(tmp_path / "out"))
        started = {*there[1:], *(pid for one in there for pid in descendants(one))}
        assert len(started) >= 3
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGHUP)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
        assert said.endswith("demo: interrupted; everything it started has been ended\n")
        assert [pid for pid in started if is_alive(pid)] == []
        assert not load(tmp_path / "out" / "broken.toml").memory_root.exists()


def test_a_demo_that_is_killed_takes_server_and_supervisor_along(tmp_path: Path) -> None:
    """Its agents, which must outlive a supervisor, leave a minute later."""
    with demo(tmp_path / "out", 0) as process:
        started = children(process.pid)
        process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in started))
        assert load(tmp_path / "out" / "broken.toml").timeouts.supervisor_lost_s <= 60
