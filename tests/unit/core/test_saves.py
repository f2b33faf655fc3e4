import math

from orchestrator.core import events as ev
from orchestrator.core.saves import SaveCost, ShardCost, together
from tests.unit.core.story import Story


def test_a_save_has_the_bytes_of_all_and_the_seconds_of_the_slowest() -> None:
    fast = ShardCost(
        stall_s=0.1, stage_s=0.1, staged_nbytes=100, tokens=8, sent_nbytes=60, sent_s=1.0
    )
    slow = ShardCost(
        stall_s=0.4,
        stage_s=0.2,
        staged_nbytes=100,
        tokens=8,
        sent_nbytes=40,
        sent_s=2.0,
        retries={"SlowDown": 2, "ReadTimeoutError": 1},
        hedges=1,
        plane="boto3",
    )
    throttled = ShardCost(sent_nbytes=10, sent_s=0.5, retries={"SlowDown": 1}, plane="awscrt")
    made = together((fast, slow, throttled), upload_s=2.5, age_s=30.0)
    assert (made.ranks, made.stall_s, made.stage_s, made.tokens) == (3, 0.4, 0.2, 8)
    assert (made.sent_nbytes, made.sent_s, made.upload_s, made.age_s) == (110, 2.0, 2.5, 30.0)
    assert made.retries == {"ReadTimeoutError": 1, "SlowDown": 3}
    assert (made.hedges, made.planes) == (1, ("awscrt", "boto3"))
    assert made.stage_bytes_per_s == 200 / 0.2
    assert made.upload_bytes_per_s == 55.0


def test_what_nobody_measured_is_neither_zero_nor_a_speed() -> None:
    made = together((), upload_s=math.nan, age_s=math.nan)
    assert math.isnan(made.stall_s)
    assert made.stage_bytes_per_s is None
    assert made.upload_bytes_per_s is None
    there_before = together((ShardCost(sent_nbytes=0, sent_s=0.1),), upload_s=1.0, age_s=1.0)
    assert there_before.upload_bytes_per_s is None


def test_an_upload_whose_begin_nobody_saw_is_not_measured() -> None:
    story = Story().running(step=12).uploads(10, upload_s=math.nan).commits(10)
    assert story.state.measured.upload_s == ()
    story = Story().running(step=12).uploads(10, 0, 1, 2).uploads(10, 3, upload_s=math.nan)
    assert story.commits(10).state.measured.upload_s == (2.0,)


def test_the_state_knows_the_last_save_and_when_it_was_committed() -> None:
    story = Story().running(step=12).uploads(10).later(5.0)
    cost = SaveCost(ranks=4, stall_s=0.1)
    story.says(ev.CheckpointCommitted(step=10, attempt=1, manifest_key="m", nbytes=4, cost=cost))
    assert story.state.last_save == cost
    assert story.state.committed_at == story.now
    story.later(5.0).commits(20)  # by a supervisor that does not know what it cost
    assert story.state.last_save == cost
