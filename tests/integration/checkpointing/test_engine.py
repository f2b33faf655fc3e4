import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from checkpointing.content import content_sha256
from checkpointing.errors import CommitRefused
from checkpointing.resolver import list_commits
from checkpointing.slot import Control, Phase
from checkpointing.stage.arena import MappedArena, UploadState, peek
from tests.integration.checkpointing.node import WITH_TORCH, Node

EVERY_FIVE = Control(interval_steps=5)


def _states(node: Node) -> set[UploadState]:
    return {staged.upload_state for rank in (0, 1) for staged in peek(node.arena(rank))}


def _ok(ended: list[tuple[int, str]]) -> None:
    assert [code for code, _ in ended] == [0, 0], ended


@pytest.mark.s3
@pytest.mark.torch
@pytest.mark.slow
def test_a_run_resumed_through_a_killed_uploader_equals_one_never_disturbed(s3_node: Node) -> None:
    _ok(s3_node.train(1, 10, EVERY_FIVE, side=2000, script=WITH_TORCH))
    assert [slot.step for slot in peek(s3_node.arena(0))] == [10, 5]
    undisturbed = s3_node.results()

    uploader = s3_node.uploader()
    deadline = time.monotonic() + 30
    while UploadState.UPLOADING not in _states(s3_node) and time.monotonic() < deadline:
        time.sleep(0.001)
    uploader.kill()
    assert UploadState.UPLOADING in _states(s3_node), "killed in the middle of an upload"
    again = s3_node.uploader()
    try:
        events = again.uploaded(5)
        assert s3_node.commit(events).committed
    finally:
        assert again.stop() == 0

    assert [(c.step, c.attempt) for c in list_commits(s3_node.store, "tiny")] == [(5, 1)]
    before = content_sha256(s3_node.store, "tiny", 5)
    assert before == content_sha256(s3_node.store, "tiny", 5)
    for rank in (0, 1):  # as on a replacement node
        s3_node.arena(rank).unlink()
    restore = {"step": 5, "attempt": 1, "source": "store"}
    _ok(s3_node.train(2, 10, EVERY_FIVE, restore=restore, side=2000, script=WITH_TORCH))
    resumed = s3_node.results()
    assert [result.pop("start") for result in resumed] == [5, 5]
    assert [result.pop("start") for result in undisturbed] == [0, 0]
    assert resumed == undisturbed


def _stage_and_commit(node: Node, steps: int = 5) -> None:
    _ok(node.train(1, steps, EVERY_FIVE))
    uploader = node.uploader()
    try:
        assert node.commit(uploader.uploaded(steps)).committed
    finally:
        assert uploader.stop() == 0


def test_own_memory_is_enough_to_resume(node: Node) -> None:
    _ok(node.train(1, 5, EVERY_FIVE))
    restore = {"step": 5, "attempt": 1, "source": "memory"}
    _ok(node.train(2, 9, EVERY_FIVE, restore=restore))
    resumed = node.results()
    for rank in (0, 1):
        node.arena(rank).unlink()
    _ok(node.train(3, 9, EVERY_FIVE))
    whole = node.results()
    assert [result.pop("start") for result in resumed] == [5, 5]
    assert [result.pop("start") for result in whole] == [0, 0]
    assert resumed == whole


def test_memory_that_does_not_hold_the_step_is_exit_77(node: Node) -> None:
    _ok(node.train(1, 5, EVERY_FIVE))
    ended = node.train(2, 9, EVERY_FIVE, restore={"step": 4, "attempt": 1, "source": "memory"})
    assert [code for code, _ in ended] == [77, 77]
    assert all(len(errors.splitlines()) == 1 and "step 4" in errors for _, errors in ended)


def test_a_flipped_byte_in_memory_is_exit_77_and_the_store_still_restores(node: Node) -> None:
    _stage_and_commit(node)
    arena = MappedArena(node.arena(1))
    newest = arena.staged()[0]
    arena.data(newest.index)[100] ^= 0x40
    arena.close()
    restore = {"step": 5, "attempt": 1, "source": "memory"}
    codes = [code for code, _ in node.train(2, 5, EVERY_FIVE, restore=restore)]
    assert codes == [0, 77]
    restore["source"] = "store"
    _ok(node.train(3, 5, EVERY_FIVE, restore=restore))


def test_a_flipped_byte_in_the_store_is_refused(node: Node) -> None:
    _stage_and_commit(node)
    for rank in (0, 1):
        node.arena(rank).unlink()
    data = node.stored_files(".bin")[0]
    content = bytearray(data.read_bytes())
    content[50] ^= 1
    data.write_bytes(content)
    restore = {"step": 5, "attempt": 1, "source": "store"}
    ended = node.train(2, 9, EVERY_FIVE, restore=restore)
    assert [code for code, _ in ended] == [79, 79]
    assert all("CRC" in errors for _, errors in ended)


def test_replicas_that_disagree_are_refused_with_tensor_and_ranks(node: Node) -> None:
    _ok(node.train(1, 5, EVERY_FIVE, extra={"POISON_RANK": "1"}))
    uploader = node.uploader()
    try:
        events = uploader.uploaded(5)
    finally:
        uploader.stop()
    with pytest.raises(CommitRefused, match=r"content differs: rank 0 against rank 1"):
        node.commit(events)
    assert list_commits(node.store, "tiny") == ()


def test_a_rank_killed_while_it_trains_leaves_a_complete_slot_or_none(node: Node) -> None:
    for kill_at in range(1, 6):
        for rank in (0, 1):
            node.arena(rank).unlink(missing_ok=True)
        processes = node.start(kill_at, 10_000, Control(interval_steps=1), side=700)
        uploader = node.uploader()
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                reading = node.views[0].read()
                if reading is not None and reading.saves >= 2 * kill_at:
                    break
                time.sleep(0.001)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
            uploader.kill()
        staged = peek(node.arena(0))
        assert staged, "the newest complete slot is never the one written to"
        step = staged[0].step
        other = {slot.step for slot in peek(node.arena(1))}
        if step in other:
            restore = {"step": step, "attempt": kill_at, "source": "memory"}
            successor = node.uploader()  # makes room for the last save
            try:
                _ok(node.train(kill_at + 100, step, EVERY_FIVE, restore=restore, side=700))
            finally:
                assert successor.stop() == 0


def test_control_changes_the_interval_at_one_step_and_stops(node: Node) -> None:
    control = Control(interval_steps=0, snapshot_step=3, stop_step=7)
    _ok(node.train(1, 9, control))
    assert [slot.step for slot in peek(node.arena(0))] == [7, 3]
    reading = node.views[0].read()
    assert reading is not None
    assert reading.phase is Phase.FINISH
    assert reading.step == 7
    assert reading.tokens == 28


def test_the_uploader_says_what_is_wrong_and_goes_on(node: Node) -> None:
    _ok(node.train(1, 5, EVERY_FIVE))
    folder = Path(urlsplit(node.config.url).path)
    folder.rmdir()
    uploader = node.uploader()
    try:
        event = uploader.next_event()
        assert event["event"] == "upload_failed"
        assert not event["final"]
        assert "no such folder" in event["error"]
        folder.mkdir()
        uploader.uploaded(5)
    finally:
        assert uploader.stop() == 0
