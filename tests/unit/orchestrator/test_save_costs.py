import json
import math

from checkpointing.slot import SlotReading
from orchestrator.agent.saves import KEPT, Saves
from orchestrator.agent.uploads import report_of
from orchestrator.core.codec import encode
from orchestrator.core.events import ShardUploaded
from orchestrator.core.saves import ShardCost
from orchestrator.core.state import State
from orchestrator.supervisor.costs import SaveCosts


def uploaded(step: int = 40, rank: int = 0, **more: object) -> ShardUploaded:
    value = {
        "event": "uploaded",
        "rank": rank,
        "attempt": 1,
        "step": step,
        "world": 2,
        "index_key": "k",
        "index_crc64": 1,
        "nbytes": 10,
        "upload_s": 0.5,
        **more,
    }
    event = report_of(value)
    assert isinstance(event, ShardUploaded)
    return event


def saved(step: int, stall_s: float = 0.25) -> SlotReading:
    return SlotReading(
        pid=1,
        stall_s=stall_s,
        stage_s=0.2,
        saved_step=step,
        saved_tokens=step * 100,
        staged_nbytes=77,
    )


def test_an_upload_is_told_with_what_staging_cost_its_rank() -> None:
    saves = Saves()
    for step in (40, 50):  # the next save is staged before the upload of this one is done
        saves.note(0, 1, saved(step, stall_s=step / 100))
    cost = saves.add_to(uploaded(40, sent_nbytes=10, sent_s=0.1, plane="boto3")).cost
    assert cost is not None
    assert (cost.stall_s, cost.stage_s, cost.staged_nbytes, cost.tokens) == (0.4, 0.2, 77, 4000)
    assert (cost.sent_nbytes, cost.sent_s, cost.plane) == (10, 0.1, "boto3")


def test_what_the_slot_said_of_another_save_or_attempt_is_not_taken_for_it() -> None:
    saves = Saves()
    event = uploaded(40)
    saves.note(0, 1, SlotReading(pid=1))  # nothing saved yet
    saves.note(0, 2, saved(40))
    saves.note(1, 1, saved(40))
    assert saves.add_to(event) == event
    for step in range(40, 41 + KEPT):
        saves.note(0, 1, saved(step))
    assert saves.add_to(event) == event  # too long ago


def test_the_journal_gets_one_sum_per_save_and_nothing_more_per_rank() -> None:
    costs = SaveCosts()
    told = [uploaded(rank=r, sent_nbytes=10 + r, sent_s=0.5, retries={"503": r}) for r in (0, 1)]
    shards = {}
    for event in told:
        kept = costs.keep(event)
        assert isinstance(kept, ShardUploaded)
        assert kept.cost is None
        assert len(json.dumps(encode(kept))) <= len(json.dumps(encode(event))) - 100
        shards[kept.rank] = kept
    state = State(uploads={(40, 1): shards}, committed_at=100.0)
    summed = costs.of((40, 1), state, now=112.0)
    assert (summed.ranks, summed.sent_nbytes, summed.upload_s, summed.age_s) == (2, 21, 0.5, 12.0)
    assert summed.retries == {"503": 1}


def test_a_supervisor_that_was_told_nothing_says_so() -> None:
    summed = SaveCosts().of((40, 1), State(uploads={(40, 1): {0: uploaded()}}), now=112.0)
    assert (summed.ranks, summed.upload_s) == (0, 0.5)
    assert summed.upload_bytes_per_s is None
    assert math.isnan(summed.age_s)


def test_costs_that_never_come_to_a_commit_are_forgotten() -> None:
    costs = SaveCosts()
    for step in range(100):
        costs.keep(uploaded(step, sent_nbytes=1, sent_s=1.0))
    assert costs.of((0, 1), State(), 1.0).ranks == 0
    assert costs.of((99, 1), State(), 1.0).ranks == 1


def test_other_reports_pass_as_they_are() -> None:
    event = ShardUploaded(
        attempt=1, step=1, rank=0, world=1, index_key="k", index_crc64=0, nbytes=1, upload_s=0.1
    )
    assert SaveCosts().keep(event) is event
    assert ShardCost() != event.cost
