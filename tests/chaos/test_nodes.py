"""Single nodes with something wrong: one that kills, one that is full, one whose clock is off."""

import json
from pathlib import Path

import pytest

from deploy.demo.processes import kill
from deploy.devcluster.client import Devcluster
from tests.chaos.conftest import MakeStory
from tests.chaos.story import RANKS, Story
from tests.integration.command_line import everstep

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


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
    assert [node["node"] for node in known if node["excluded"]] == [bad]
    assert story.sums() == undisturbed


def ledger(story: Story) -> list[dict[str, object]]:
    """Return what `everstep nodes ls` says of the folder that the story's runs share."""
    told = everstep("nodes", "ls", "--dir", story.config.run.dir, "--json")
    assert told.returncode == 0, told.stderr
    found: list[dict[str, object]] = json.loads(told.stdout)
    return found


def test_full_memory_stops_no_training_and_a_full_spare_is_passed_over(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    story = tell(spares=2)
    story.begin()
    first, worker = story.nodes
    full, free = sorted({node.name for node in story.state.nodes.values()} - {first, worker})
    for node in (first, full):
        cluster.on(node, "sh", "-c", "cat /dev/zero > /dev/shm/fill 2>/dev/null; true")
    story.trains_on()
    assert not story.state.incidents
    cluster.do("power-off", worker)
    story.wait("ranks on the free spare", lambda state: free in story.nodes)
    story.goes_on(2)
    assert story.nodes == (first, free)
    for node in (first, full):
        cluster.on(node, "rm", "/dev/shm/fill")
    incidents = story.finish()
    assert incidents[0].node == worker
    assert {i.node for i in incidents[1:]} == {full}
    assert story.sums() == undisturbed


def test_a_clock_that_is_a_minute_off_changes_nothing(
    tell: MakeStory, cluster: Devcluster, undisturbed: dict[str, str]
) -> None:
    if not FAKETIME.exists():
        pytest.skip("NO WRONG CLOCK IS TESTED: apt-get install faketime")
    preload = f"export LD_PRELOAD={FAKETIME} FAKETIME_TIMESTAMP_FILE=/tmp/clock"
    preload += " FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_NO_CACHE=1"
    story = tell(slurm=f'prologue = ["{preload}"]')
    cluster.on("node2", "sh", "-c", "echo +60 > /tmp/clock")
    ahead = f"LD_PRELOAD={FAKETIME} FAKETIME_TIMESTAMP_FILE=/tmp/clock date +%s"
    clocks = [int(cluster.on(node, "sh", "-c", ahead)) for node in ("node1", "node2")]
    assert 58 < clocks[1] - clocks[0] < 70
    story.begin(late="node3")
    wrong = story.nodes.index("node2")
    kill(story.living_ranks("node2", 1)[0].pid)
    story.goes_on(2)
    (incident,) = story.finish()
    assert (incident.fault, incident.node) == ("rank_killed", "node2")
    assert incident.rank in range(wrong * RANKS, (wrong + 1) * RANKS)
    assert 0 <= incident.detected_at - incident.fault_at < 30
    assert story.sums() == undisturbed
