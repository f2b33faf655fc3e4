"""Which nodes of a real Slurm are given up, and when: no power, no cable, no CPU, a bad link."""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.core.events import AgentLost
from tests.integration.devclusters import MARKS, cluster_of_three, make_whole
from tests.integration.test_slurm_run import DATA, TOML, SlurmRun, all_ranks_started
from tests.integration.traces import traces

pytestmark = [*MARKS, pytest.mark.timeout(240)]

HEARTBEAT_S = 0.5
AGENT_LOST_S = 60.0
SUSPECT_S = 3 * HEARTBEAT_S
FEW_BEATS = 16 * HEARTBEAT_S  # generous: about 5 on a quiet machine
TROUBLE_S = 6 * SUSPECT_S


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    with cluster_of_three("v", tmp_path_factory.getbasetemp()) as running:
        yield running


@pytest.fixture
def run(tmp_path: Path, cluster: Devcluster, request: pytest.FixtureRequest) -> Iterator[SlurmRun]:
    """Two nodes that train, a spare, and an `agent_lost_s` that no test waits for."""
    text = TOML.format(
        name=f"alive{abs(hash(request.node.name)) % 10_000}",
        script=DATA / "short_job.py",
        seconds=200,
        gate=tmp_path / "gate",
        workdir=tmp_path,
        host=cluster.env()["DEVCLUSTER_ADDRESS"],
    )
    text = text.replace("heartbeat_s = 0.2", f"heartbeat_s = {HEARTBEAT_S}")
    text = text.replace("agent_lost_s = 4.0", f"agent_lost_s = {AGENT_LOST_S}")
    toml = tmp_path / "run.toml"
    toml.write_text(text, encoding="utf-8")
    made = SlurmRun(toml, dict(cluster.env()), lambda _: None)
    made.gate, made.cluster = tmp_path / "gate", cluster
    made.start()
    made.wait("all ranks", lambda state: all_ranks_started(state) and len(state.nodes) == 3)
    watched(made, 2 * SUSPECT_S)  # their ports have been reached by then
    yield made
    made.open_gate()
    made.close()
    for name in cluster.nodes():
        cluster.do("heal", name)
    make_whole(cluster)
    assert not traces(made.config)


def watched(run: SlurmRun, seconds: float) -> list[AgentLost]:
    """Let the run go on and return who was given up so far."""
    end = time.monotonic() + seconds
    run.wait("the time to pass", lambda _: time.monotonic() > end)
    return [record.event for record in run.records if isinstance(record.event, AgentLost)]


def given_up(run: SlurmRun, fault: str, node: str, *words: str) -> AgentLost:
    """Do something to a node and return how it was given up."""
    began = time.monotonic()
    run.cluster.do(fault, node, *words)
    done_s = time.monotonic() - began
    run.wait(f"{node} is lost", lambda state: not state.nodes[node].alive)
    lost = watched(run, 0.0)
    assert [event.node for event in lost] == [node]
    record = next(r for r in run.records if r.event == lost[0])
    took_s = record.at - time.time() + time.monotonic() - began
    print(f"{fault}: {lost[0].why}; {took_s:.2f} s after it began, it took {done_s:.2f} s")
    return lost[0]


@contextlib.contextmanager
def burning(cluster: Devcluster, node: str) -> Iterator[None]:
    """Have the agent share what little CPU its node gets with greedy neighbours."""
    loops = "for n in 1 2 3 4 5 6; do (while :; do :; done) & done; wait"
    words = ("timeout", "-s", "KILL", str(TROUBLE_S), "sh", "-c", loops)  # ends its whole group
    argv = cluster.argv("shell", node, "--", *words)
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as process:
        yield
        process.wait()


def a_training_node(run: SlurmRun) -> str:
    assert run.state.attempt is not None
    return run.state.attempt.nodes[-1]


@pytest.mark.parametrize("fault", ["power-off", "partition", "drop"])
def test_a_node_that_cannot_be_reached_is_lost_after_a_few_heartbeats(
    run: SlurmRun, fault: str
) -> None:
    lost = given_up(run, fault, a_training_node(run))
    assert SUSPECT_S <= lost.silent_s < FEW_BEATS
    assert "its machine does not answer" in lost.why
    run.wait("the spare", lambda state: state.last_attempt == 2 and all_ranks_started(state))


def test_the_nodes_of_a_training_run_are_lost_only_for_good_reason(run: SlurmRun) -> None:
    """A stopped agent, a busy node and a bad link stay; an agent that was killed goes at once."""
    node = a_training_node(run)
    agent = json.loads((run.config.run_dir / "nodes" / node / "agent.json").read_text("utf-8"))

    # First: a node that was silent once has such a silence among its habits.
    run.cluster.on(node, "kill", "-STOP", str(agent["pid"]))
    assert not watched(run, TROUBLE_S)
    run.cluster.on(node, "kill", "-CONT", str(agent["pid"]))
    assert not watched(run, SUSPECT_S)
    assert says_it_waited(run, node)

    # Nothing is said of it where the kernel shares even so little CPU fairly.
    with burning(run.cluster, node):
        run.cluster.do("throttle", node, "--cpu", "0.01")
        assert not watched(run, TROUBLE_S)
        run.cluster.do("heal", node)
    assert not watched(run, SUSPECT_S)

    run.cluster.do("drop", node, "--percent", "30")
    assert not watched(run, 2 * TROUBLE_S)
    run.cluster.do("heal", node)
    assert not watched(run, SUSPECT_S)
    assert run.state.last_attempt == 1

    began = time.monotonic()
    run.cluster.on(node, "kill", "-KILL", str(agent["pid"]))
    run.wait("the agent is lost", lambda state: not state.nodes[node].alive)
    (lost,) = watched(run, 0.0)
    print(f"killed agent: {lost.why}; {time.monotonic() - began:.2f} s")
    assert lost.silent_s < FEW_BEATS
    run.wait("the spare", lambda state: state.last_attempt == 2 and all_ranks_started(state))


def says_it_waited(run: SlurmRun, node: str) -> int:
    """Count the silences that the supervisor noticed and waited out."""
    text = run.log_path.read_text(encoding="utf-8")
    return text.count(f"{node} says nothing, but its machine answers")
