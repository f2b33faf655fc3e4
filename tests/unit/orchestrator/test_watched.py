"""The agent's side of the process that keeps a trainer's own folders."""

import logging
import math
from pathlib import Path

import pytest

from checkpointing.watched import attempts
from orchestrator.agent.watched import Watched, command
from orchestrator.config import load
from orchestrator.core.events import FolderStep, FolderWatched
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
    Watched(config, "n0", tmp_path, "{}", [].append).attempt(start)
    noted = attempts.read(config.run_dir / "nodes" / "n0" / "attempts")
    assert [(one.number, one.nodes) for one in noted] == [(3, 2)]


def heard(tmp_path: Path, *said: dict[str, object]) -> list[FolderWatched]:
    facts: list[FolderWatched] = []
    watched = Watched(run_config(tmp_path, **TABLES), "n0", tmp_path, "{}", facts.append)
    for value in said:
        watched.heard(value)
    return facts


def test_what_became_of_a_folder_is_a_fact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        waiting, kept, failed = (
            {"event": "said", "entry": "checkpoint-1", "why": "not finished"},
            {"event": "committed", "entry": "checkpoint-2", "version": 1, "nbytes": 7},
            {"event": "failed", "entry": "", "why": "no answer; tried again"},
        )
        facts = heard(tmp_path, waiting, kept, failed)
    assert [(f.node, f.entry, f.step, f.version, f.nbytes, f.why) for f in facts] == [
        ("n0", "checkpoint-2", FolderStep.COMMITTED, 1, 7, ""),
        ("n0", "", FolderStep.FAILED, 0, 0, "no answer; tried again"),
    ]
    assert "checkpoint-1: not finished" in caplog.text
    assert "committed checkpoint-2" in caplog.text


def test_an_age_that_is_not_known_is_not_now(tmp_path: Path) -> None:
    known = {"event": "known", "entry": "checkpoint-2", "version": 1, "age_s": None}
    (fact,) = heard(tmp_path, known)
    assert math.isnan(fact.age_s)


def test_what_is_unknown_is_no_fact(tmp_path: Path) -> None:
    for odd in ({"event": "other"}, {"event": "committed", "entry": "a", "version": "one"}):
        with pytest.raises((KeyError, ValueError)):
            heard(tmp_path, odd)


def test_a_relative_directory_is_relative_to_the_file(tmp_path: Path) -> None:
    text = '[checkpoint]\nstore = "file:///s"\n[checkpoint.watch]\ndir = "out"\npattern = "c-*"\n'
    watch = load(write(tmp_path, LEAST + text)).checkpoint.watch
    assert watch is not None
    assert watch.dir == tmp_path / "out"
