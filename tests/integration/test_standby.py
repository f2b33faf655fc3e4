"""`everstep run --standby` on two nodes: the second goes on where the first one ends, or hangs."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.core.actions import Outcome
from orchestrator.exit_codes import ExitCode
from orchestrator.launch.slurm_text import SlurmJobState
from orchestrator.views.replay import replay
from tests.integration.devclusters import (
    MARKS,
    cluster_of_three,
    eventually,
    make_whole,
    memory_of_nodes,
)
from tests.integration.slurm_nodes import OnNode, WatchedRun, all_ranks_started
from tests.integration.traces import traces

pytestmark = [*MARKS, pytest.mark.timeout(170)]


class Pair(WatchedRun):
    """A run with ranks on node3, a supervisor on node1, and one on node2 that stands by."""

    first: OnNode
    second: OnNode

    def begin(self, folder: Path) -> None:
        words = ["run", str(self.toml), "--plain"]
        self.first = OnNode(self.cluster, "node1", words, folder / "first.log")
        self.wait("all ranks", all_ranks_started)
        words.append("--standby")
        self.second = OnNode(self.cluster, "node2", words, folder / "second.log")
        eventually("it stands by", lambda: "standing by" in self.second.said())
        assert "supervised by node1, pid " in self.second.said()

    def is_taken_over(self) -> None:
        self.wait("the second supervisor", lambda state: state.epoch == 2)
        where = self.config.run_dir / "supervisor.json"  # written after it has said so
        self.wait("its address", lambda _: json.loads(where.read_text("utf-8"))["epoch"] == 2)
        assert self.holder.startswith("node2:")

    def ended_untouched(self) -> None:
        self.until_over()
        assert self.second.code() == ExitCode.OK
        assert self.state.outcome is Outcome.FINISHED
        assert not self.state.incidents
        (start,) = self.starts()
        assert [words for words in self.notes() if words[0] == "end"] == [
            ["end", "1", str(rank), str(pid)]
            for rank, pid in zip(start.ranks, start.pids, strict=True)
        ]
        assert not replay(self.records).differences
        epochs = self.epochs_as_written()
        assert epochs == sorted(epochs), "the first wrote nothing after the second"
        eventually(
            "there was one job", lambda: [j.state for j in self.jobs()] == [SlurmJobState.COMPLETED]
        )

    def close(self) -> None:
        for name in ("first", "second"):
            if hasattr(self, name):
                getattr(self, name).close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    with cluster_of_three("b", tmp_path_factory.getbasetemp()) as running:
        yield running


@pytest.fixture
def begin(tmp_path: Path, cluster: Devcluster) -> Iterator[Callable[[str], Pair]]:
    pairs: list[Pair] = []

    def make(name: str) -> Pair:
        pair = Pair.write(tmp_path, cluster, name, count=1, exclude="node1,node2")
        pairs.append(pair)
        pair.begin(tmp_path)
        return pair

    yield make
    for pair in pairs:
        pair.close()
    make_whole(cluster)
    assert not memory_of_nodes(cluster)
    assert not [found for pair in pairs for found in traces(pair.config)]


Begin = Callable[[str], Pair]


def test_a_standby_takes_over_from_a_killed_supervisor(begin: Begin) -> None:
    pair = begin("killed")
    pair.first.send(signal.SIGKILL)
    pair.is_taken_over()
    pair.ended_untouched()


def test_a_standby_takes_over_when_the_supervisors_node_loses_power(begin: Begin) -> None:
    pair = begin("dark")
    pair.cluster.do("power-off", "node1")
    pair.is_taken_over()
    pair.ended_untouched()


def test_a_frozen_supervisor_is_deposed_and_leaves_without_a_word_to_the_journal(
    begin: Begin,
) -> None:
    pair = begin("frozen")
    pair.first.send(signal.SIGSTOP)
    pair.is_taken_over()
    where = (pair.config.run_dir / "supervisor.json").read_text()
    pair.first.go_on()
    assert pair.first.code() == ExitCode.ALREADY_RUNNING
    assert "another supervisor has taken over" in pair.first.said().splitlines()[-1]
    assert (pair.config.run_dir / "supervisor.json").read_text() == where
    assert pair.second.runs
    pair.ended_untouched()


def test_a_standby_is_let_in_at_once_by_a_supervisor_that_is_told_to_end(begin: Begin) -> None:
    pair = begin("polite")
    pair.first.send(signal.SIGTERM)
    assert pair.first.code() == ExitCode.INTERRUPTED
    pair.is_taken_over()
    pair.ended_untouched()


def test_a_standby_ends_as_the_run_does(begin: Begin) -> None:
    pair = begin("over")
    pair.until_over()
    assert pair.first.code() == ExitCode.OK
    assert pair.second.code() == ExitCode.OK
    pair.refresh()
    assert pair.state.epoch == 1
