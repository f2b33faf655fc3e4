"""The agent's side of the process that keeps a trainer's own folders."""

import logging
from pathlib import Path

import pytest

from checkpointing.watched import attempts
from orchestrator.agent.watched import Watched, command
from orchestrator.config import load
from orchestrator.wire import StartNode
from tests.unit.orchestrator.desk import run_config
from tests.unit.orchestrator.test_config import LEAST, write

WATCH = {"dir": "/out", "pattern": "checkpoint-*", "shared": False, "delete": True, "keep": 2}
TABLES = {"checkpoint": {"store": "file:///store", "watch": WATCH}, "nodes": {"count": 2}}


def test_the_process_is_told_what_the_run_file_says(tmp_path: Path) -> None:
    words = command(run_config(tmp_path, **TABLES), "n0", "{}", tmp_path / "log")
    for pair in (
        ("--dir", "/out"),
        ("--node", "n0"),
        ("--nodes", "2"),
        ("--keep", "2"),
        ("--name", "small"),
        ("--attempts", str(tmp_path / "log")),
    ):
        assert words[words.index(pair[0]) + 1] == pair[1]
    assert "--delete" in words
    assert "--shared" not in words


def test_attempts_are_noted_where_the_next_agent_finds_them(tmp_path: Path) -> None:
    config = run_config(tmp_path, **TABLES)
    (config.run_dir / "nodes" / "n0").mkdir(parents=True)
    start = StartNode(
        attempt=3,
        node_rank=0,
        num_nodes=2,
        ranks=1,
        master_addr="h",
        master_port=1,
        restore=None,
        interval_steps=1,
    )
    Watched(config, "n0", tmp_path, "{}").attempt(start)
    noted = attempts.read(config.run_dir / "nodes" / "n0" / "attempts")
    assert [(one.number, one.nodes) for one in noted] == [(3, 2)]


def test_what_it_says_is_in_the_agents_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(run_config(tmp_path, **TABLES), "n0", tmp_path, "{}")
    with caplog.at_level(logging.INFO):
        watched.heard({"event": "said", "entry": "checkpoint-1", "why": "not finished"})
        watched.heard({"event": "committed", "entry": "checkpoint-2"})
    assert "checkpoint-1: not finished" in caplog.text
    assert "committed checkpoint-2" in caplog.text
    with pytest.raises(KeyError):
        watched.heard({"event": "other"})


def test_a_relative_directory_is_relative_to_the_file(tmp_path: Path) -> None:
    text = '[checkpoint]\nstore = "file:///s"\n[checkpoint.watch]\ndir = "out"\npattern = "c-*"\n'
    watch = load(write(tmp_path, LEAST + text)).checkpoint.watch
    assert watch is not None
    assert watch.dir == tmp_path / "out"
