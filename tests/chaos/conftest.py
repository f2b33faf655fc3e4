"""One real Slurm for all stories, and one run that nothing happens to."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.devcluster.client import Devcluster
from orchestrator.process_id import start_time
from tests.chaos.nodes import memory, namespace, power
from tests.chaos.story import Setting, Story
from tests.integration.devclusters import WHY_NOT, eventually, shares

MakeStory = Callable[..., Story]

OPTIONS = ["--nodes", "5", "--gpus", "0", "--shm-size", "192m", "--grace", "10"]
SETTINGS = {
    # Long enough that Slurm forgives a partition which everstep has acted on meanwhile.
    "SlurmdTimeout": "20",
    "KillWait": "10",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every story; where none can be told, the skip says so."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.chaos)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(240))
            if WHY_NOT is not None:
                item.add_marker(pytest.mark.skip(reason=f"NO CHAOS IS TESTED: {WHY_NOT}"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    """Bring up five nodes that see a folder of this machine, and see them gone at the end."""
    settings = [word for pair in SETTINGS.items() for word in ("--set", "=".join(pair))]
    options = [*OPTIONS, *settings, *shares(tmp_path_factory.getbasetemp())]
    with Devcluster(f"c{os.getpid()}", *options) as running:
        yield running
        seen = {namespace(pid) for pid in power(running).values()}
    assert not running.state.exists()
    left = {namespace(pid) for pid in living()} & seen
    assert not left, f"namespaces of nodes are still there: {left}"


def living() -> list[int]:
    """Return all processes of this machine but zombies."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if start_time(pid) is not None]


@pytest.fixture(scope="session")
def undisturbed(
    cluster: Devcluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Run once without a fault; what it ends in is what every story has to end in."""
    make_whole(cluster)
    story = Story(cluster, tmp_path_factory.mktemp("undisturbed"), "undisturbed", Setting())
    try:
        story.begin()
        assert not story.finish()
        assert len(story.starts()) == 1
        yield story.sums()
    finally:
        story.close()


@pytest.fixture
def tell(
    cluster: Devcluster, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[MakeStory]:
    """Make a story on a cluster that is whole, and make it whole again."""
    make_whole(cluster)
    stories: list[Story] = []

    def make(**setting: object) -> Story:
        words = re.findall("[a-z0-9]+", request.node.name.removeprefix("test_"))
        name = f"{'-'.join(words)[:36].strip('-')}-{len(stories)}"
        stories.append(Story(cluster, tmp_path / f"story{len(stories)}", name, Setting(**setting)))
        return stories[-1]

    yield make
    for story in stories:
        story.close()
    make_whole(cluster)


def make_whole(cluster: Devcluster) -> None:
    """End all jobs, undo all faults, and have all nodes back with nothing in their memory."""
    cluster.do("start-slurmctld")
    cluster.slurm("scancel", "--full", "--user=root")
    for name, node in cluster.nodes().items():
        if not node["power"]:
            cluster.do("power-on", name)
        cluster.do("heal", name)
        cluster.on(name, "sh", "-c", "rm -rf /dev/shm/* /tmp/clock")
    eventually("all nodes are idle", lambda: _are_idle(cluster))
    assert not memory(power(cluster)), "an agent left something behind after its end"


def _are_idle(cluster: Devcluster) -> bool:
    states = {name: str(node["slurm"]) for name, node in cluster.nodes().items()}
    for name, state in states.items():
        if state.startswith("completing"):  # Slurm asks a node that was dead about it once a minute
            words = (f"NodeName={name}", "State=DOWN", "Reason=chaos")
            cluster.slurm("scontrol", "update", *words)
        elif state != "idle":
            cluster.attempt("undrain", name)
    return set(states.values()) == {"idle"}
