"""Single nodes with something wrong: one that kills, one that is full, one whose clock is off."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from deploy.demo.processes import kill
from deploy.devcluster.client import Devcluster
from orchestrator.core.ledger import NodeIncident
from orchestrator.ledger import FILE_NAME, Ledger
from tests.chaos.conftest import MakeStory
from tests.chaos.story import DATA, RANKS, Story
from tests.integration.command_line import everstep


def test_a_node_that_kills_its_ranks_three_times_is_excluded_for_all_runs(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(budget="node_strikes = 3")
    story.begin()
    first, bad = story.nodes
    spare = story.spare
    for strike in (1, 2, 3):
        assert story.nodes == (first, bad), f"before strike {strike}"
        kill(story.living_ranks(bad, strike)[0].pid)
        story.goes_on(strike + 1)
    assert story.nodes == (first, spare)
    incidents = story.finish()
    assert [(i.fault, i.node) for i in incidents] == [("rank_killed", bad)] * 3
    known = ledger(story)
    assert [(node["name"], node["state"]) for node in known] == [(bad, "excluded")]
    assert story.sums() == undisturbed


@pytest.mark.parametrize(
    "known",
    [("node4", "node5"), tuple(f"rack{n}" for n in range(10))],
    ids=["two of this cluster", "ten that it lacks"],
)
def test_no_further_node_is_excluded_once_many_were(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str], known: tuple[str, ...]
) -> None:
    story = tell(budget=f"node_strikes = 1\nexclusion_limit = {len(known)}")
    excluded_by_another_run(story, known)
    story.begin()
    placed = story.nodes
    assert not set(placed) & set(known)
    kill(story.living_ranks(placed[1], 1)[0].pid)
    story.goes_on(2)
    assert story.nodes == placed, "with one strike it would have been excluded"
    (incident,) = story.finish()
    assert (incident.fault, incident.node) == ("rank_killed", placed[1])
    states = {node["name"]: node["state"] for node in ledger(story)}
    assert [name for name, state in states.items() if state == "excluded"] == list(known)
    assert story.sums() == undisturbed


def excluded_by_another_run(story: Story, nodes: tuple[str, ...]) -> None:
    """Have all these nodes in the ledger, as if their whole rack had failed under another run."""
    story.config.run.dir.mkdir()
    book = Ledger(story.config.run.dir / FILE_NAME)
    for number, node in enumerate(nodes, start=1):
        incident = NodeIncident(
            at=time.time(),
            node=node,
            run="another",
            incident=number,
            fault="rank_killed",
            cause="killed by SIGKILL",
            excluded_s=3600.0,
        )
        book.note(incident)


def ledger(story: Story) -> list[dict[str, object]]:
    """Return what `everstep nodes ls` says of the folder that the story's runs share."""
    told = everstep("nodes", "ls", "--dir", story.config.run.dir, "--json")
    assert told.returncode == 0, told.stderr
    found: list[dict[str, object]] = json.loads(told.stdout)["nodes"]
    return found


def test_full_memory_stops_no_training_and_gets_no_ranks(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(spares=2)
    fill(cluster, "node1")
    story.begin()
    assert "node1" not in story.nodes
    first, worker = story.nodes
    fill(cluster, first)
    story.trains_on()
    assert not story.state.incidents, "its memory was its own before"
    cluster.on(first, "rm", "/dev/shm/fill")
    cluster.do("power-off", worker)
    story.goes_on(2)
    assert "node1" not in story.nodes
    cluster.on("node1", "rm", "/dev/shm/fill")
    (incident,) = story.finish()
    assert incident.node == worker
    assert story.sums() == undisturbed


def test_a_spare_that_is_full_by_now_is_passed_over(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(spares=2)
    story.begin()
    first, worker = story.nodes
    full, free = sorted({node.name for node in story.state.nodes.values()} - {first, worker})
    fill(cluster, full)
    cluster.do("power-off", worker)
    story.wait("ranks on the free spare", lambda _: free in story.nodes)
    story.goes_on(2)
    assert story.nodes == (first, free)
    cluster.on(full, "rm", "/dev/shm/fill")
    incidents = story.finish()
    assert incidents[0].node == worker
    assert {i.node for i in incidents[1:]} <= {full}
    assert story.sums() == undisturbed


def fill(cluster: Devcluster, node: str) -> None:
    """Leave no byte of a node's memory for files."""
    cluster.on(node, "sh", "-c", "cat /dev/zero > /dev/shm/fill 2>/dev/null; true")


def test_a_clock_that_is_a_minute_off_changes_nothing(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    wrong_clock = compiled(DATA / "wrong_clock.c", tmp_path / "wrong_clock.so")
    story = tell(slurm=f'prologue = ["export LD_PRELOAD={wrong_clock}"]')
    cluster.on("node2", "sh", "-c", "echo 60 > /tmp/clock")
    tells = ("env", f"LD_PRELOAD={wrong_clock}", "date", "+%s")
    right, wrong = (int(cluster.on(node, *tells)) for node in ("node1", "node2"))
    assert 55 < wrong - right < 90
    story.begin(late="node3")
    place = story.nodes.index("node2")
    kill(story.living_ranks("node2", 1)[0].pid)
    story.goes_on(2)
    (incident,) = story.finish()
    assert (incident.fault, incident.node) == ("rank_killed", "node2")
    assert incident.rank in range(place * RANKS, (place + 1) * RANKS)
    assert 0 <= incident.detected_at - incident.fault_at < 30
    assert story.sums() == undisturbed


def compiled(source: Path, library: Path) -> Path:
    """Compile a library to be preloaded."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("NO WRONG CLOCK IS TESTED: apt-get install gcc libc6-dev")
    argv = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    subprocess.run(argv, check=True, timeout=60)
    return library
