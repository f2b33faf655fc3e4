"""A disk that takes nothing, or no more, and a buddy that stands still: the other tier goes on."""

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from checkpointing.tiers import Tier
from tests.integration.checkpointing.replicating import ReplicaNode
from tests.integration.checkpointing.test_replicas import BOTH, SMALL, held_slots, reach

MakeNode = Callable[..., ReplicaNode]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    made: list[ReplicaNode] = []

    def make(name: str, *options: str, rank: int = 0, under: Sequence[str] = ()) -> ReplicaNode:
        made.append(ReplicaNode(tmp_path / name, *options, rank=rank, world=2, under=under))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def mounted(disk: Path, options: str) -> list[str]:
    """Return a command that puts a small disk there that only its process sees."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("no mount namespace of one's own here")
    disk.mkdir()
    script = 'mount -t tmpfs -o "$1" none "$2" && shift 2 && exec "$@"'
    return ["unshare", "-m", "sh", "-c", script, "sh", options, str(disk)]


@pytest.mark.parametrize("options", ["size=4m", "ro"])
def test_a_disk_that_takes_nothing_leaves_the_other_tier_alone(
    node: MakeNode, tmp_path: Path, options: str
) -> None:
    sender = node("sender", under=mounted(tmp_path / "disk", options))
    buddy = node("buddy", rank=1)
    sender.say(do="buddy", address=buddy.address)
    for step in (1, 2):
        sender.stage(step, SMALL, BOTH)
        buddy.until(lambda step=step: step in buddy.held("peer"))
    sender.until(lambda: not held_slots(sender))
    assert sender.held("disk") == []
    if options != "ro":
        assert sender.until(lambda: sender.of("copy_failed"))[0]["tier"] == "disk"
    assert sender.stop() == 0


def test_a_disk_that_gets_full_in_a_copy_keeps_the_one_before_and_takes_the_next(
    node: MakeNode,
) -> None:
    sender = node("sender")
    sender.stage(1, SMALL, Tier.DISK)
    sender.until(lambda: sender.held("disk") == [1])
    limits = resource.prlimit(sender.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(sender.process.pid, resource.RLIMIT_FSIZE, (SMALL // 2, limits[1]))
    sender.stage(2, SMALL, Tier.DISK)
    failed = sender.until(lambda: sender.of("copy_failed"))[0]
    assert (failed["tier"], failed["step"]) == ("disk", 2)
    assert "large" in failed["error"]
    assert sender.held("disk") == [1]
    resource.prlimit(sender.process.pid, resource.RLIMIT_FSIZE, limits)
    sender.until(lambda: sender.held("disk") == [2, 1])
    assert sender.coming() == []


def test_a_buddy_that_stands_still_holds_up_nothing_else_and_goes_on(node: MakeNode) -> None:
    sender = node("sender", "--max-bytes-per-s", "16e6")
    buddy = node("buddy", rank=1)
    sender.say(do="buddy", address=buddy.address)
    sender.stage(1, SMALL, Tier.PEER)
    reach(buddy, 1, "half")
    os.kill(buddy.process.pid, signal.SIGSTOP)
    try:
        sender.stage(2, SMALL, Tier.DISK)
        sender.until(lambda: sender.held("disk") == [2])
    finally:
        os.kill(buddy.process.pid, signal.SIGCONT)
    buddy.until(lambda: buddy.held("peer") == [1])
    sender.until(lambda: not held_slots(sender))
    assert buddy.coming() == []
