"""Watched folders as processes: kill -9 at every step, and on a real S3 server."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpointing.store.base import StoreConfig, open_store
from checkpointing.watched import commits
from deploy.demo.s3_server import S3Server
from tests.integration.checkpointing.watched_child import CONTENT
from tests.unit.checkpointing.watched import Watch, content, write

WAIT_S = 60.0
MIB = 1 << 20


def test_kill_at_every_step_leaves_the_folder_or_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "tests.integration.checkpointing.watched_child"
    done = subprocess.run(
        [sys.executable, "-m", module, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    steps = int(done.stdout)
    assert steps > 30
    for name in ("documents", "sending"):
        monkeypatch.setattr(f"checkpointing.watched.{name}.PIECE", 4096)
    for at in range(1, steps + 1):
        watch = Watch(tmp_path / f"{at:03d}", {"delete": True, "keep": 0})
        folder = watch.out / "checkpoint-1"
        assert watch.store is not None
        committed = commits.newest(watch.store, "run", "checkpoint-1") is not None
        whole = folder.is_dir() and content(folder) == CONTENT
        assert whole or (committed and not folder.exists()), at
        watch.poll()
        assert watch.committed() == {"checkpoint-1": 1}, at
        assert watch.fetched() == CONTENT, at
        assert sorted(path.name for path in watch.out.iterdir()) == [".everstep-watch.lock"], at


class Trainer:
    """A directory, where it is kept, and the command line."""

    def __init__(self, root: Path, config: StoreConfig) -> None:
        self.out = root / "out"
        self.out.mkdir()
        self.store = open_store(config)
        self.events = root / "events"
        self._config = config.to_json()

    def command(self, *words: str) -> list[str]:
        place = ("--store", self._config, "--name", "run")
        return [sys.executable, "-m", "checkpointing.watched", *words, *place]

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, timeout=WAIT_S, check=True
        )
        return done.stdout

    @contextmanager
    def watching(self, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
        rules = ("--dir", str(self.out), "--pattern", "checkpoint-*", "--finished", "rename")
        with self.events.open("ab") as events:
            process = subprocess.Popen(
                [*self.command(*rules, *words, "--delete", "--poll-s", "0.1", "--until-eof")],
                stdin=subprocess.PIPE,
                stdout=events,
            )
            try:
                yield process
            finally:
                process.kill()
                process.communicate()

    def told(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.events.read_bytes().splitlines()]
        return [line for line in lines if line["event"] == event]


def _until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.s3
def test_a_watch_on_real_s3_goes_on_after_kill_and_gives_back(
    tmp_path: Path, s3_server: S3Server
) -> None:
    url = f"{s3_server.store_url}/{secrets.token_hex(4)}"
    config = StoreConfig(url=url, endpoint_url=s3_server.url, region="us-east-1")
    trainer = Trainer(tmp_path, config)
    first = {"model.bin": os.urandom(70 * MIB), "trainer_state.json": b"{}"}
    write(trainer.out / "checkpoint-1", first)
    with trainer.watching("--max-bytes-per-s", str(20 * MIB)) as process:
        # The first piece of three is there.
        _until(lambda: trainer.store.list("run/watched/data"))
        process.kill()
        process.wait(timeout=WAIT_S)
    assert trainer.ask("ls", "--json") == "[]\n"
    assert content(trainer.out / "checkpoint-1") == first
    write(trainer.out / "checkpoint-2", {"model.bin": b"2" * MIB})
    with trainer.watching() as process:
        _until(lambda: len(trainer.told("removed")) == 1)
        assert process.stdin is not None
        process.stdin.close()  # the end of the job: what is committed stays so, and it leaves
        assert process.wait(timeout=WAIT_S) == 0
    assert [path.name for path in sorted(trainer.out.glob("checkpoint-*"))] == ["checkpoint-2"]
    listed = json.loads(trainer.ask("ls", "--json"))
    assert [(row["entry"], row["version"]) for row in listed] == [
        ("checkpoint-2", 1),
        ("checkpoint-1", 1),
    ]
    back = tmp_path / "back"
    assert trainer.ask("restore", "--dir", str(back)) == f"{back}/checkpoint-2\n"
    trainer.ask("restore", "--dir", str(back), "checkpoint-1")
    assert content(back / "checkpoint-1") == first
    assert not trainer.store.open_uploads("run/")
