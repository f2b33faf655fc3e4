import typing

import pytest

from orchestrator.core import actions as act
from orchestrator.core import events as ev
from orchestrator.views import events
from orchestrator.views.events import describe, describe_action, kinds, line, row, select
from tests.unit.views.story import Story, whole_story

NAN = float("nan")


def test_every_kind_of_event_has_words() -> None:
    assert set(events.WORDS) == set(typing.get_args(ev.Event))


def test_every_record_of_a_run_is_one_line() -> None:
    for record in whole_story().records:
        text = line(record)
        assert text
        assert "\n" not in text


def test_a_signal_is_named() -> None:
    exited = ev.RankExited(attempt=1, node="n1", rank=2, code=-9, ours=False)
    assert describe(exited) == "rank 2 on n1 was ended by SIGKILL"


def test_an_unknown_signal_is_numbered() -> None:
    exited = ev.RankExited(attempt=1, node="n1", rank=2, code=-200, ours=False)
    assert "signal 200" in describe(exited)


def test_a_stop_that_we_ordered_does_not_read_as_a_fault() -> None:
    exited = ev.RankExited(attempt=1, node="n1", rank=2, code=-15, ours=True)
    assert describe(exited).endswith("as it was told to")


def test_progress_without_a_loss_does_not_invent_one() -> None:
    progress = ev.Progress(
        attempt=1,
        min_step=5,
        max_step=7,
        loss=NAN,
        step_s=NAN,
        stall_s=NAN,
        saves=0,
        skipped_saves=0,
        tokens=0,
    )
    assert describe(progress) == "step 5..7"


def test_filters_keep_only_the_kinds_asked_for() -> None:
    records = whole_story().records
    kept = select(records, ["fault_judged", "agent_lost"])
    assert [events.kind_of(r.event) for r in kept] == [
        "fault_judged",
        "agent_lost",
        "fault_judged",
    ]
    assert "fault_judged" in kinds()


def test_a_row_carries_words_and_the_stored_event() -> None:
    record = whole_story().records[0]
    body = row(record)
    assert body["kind"] == "run_requested"
    assert body["event"]["run"] == "moe-demo"
    assert body["text"].startswith("run moe-demo: 2 nodes x 2 ranks")


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (act.Launch(nodes=1), "ask for an allocation of 1 node"),
        (act.StopRanks(attempt=2, nodes=("a",), planned=True), "save and leave attempt 2 on a"),
        (act.Snapshot(attempt=1, step=70), "save once at step 70"),
        (act.Finish(outcome=act.Outcome.FAILED), "end the run as failed"),
        (act.Wait(), "wait"),
    ],
)
def test_actions_read_as_intentions(action: act.Action, words: str) -> None:
    assert describe_action(action) == words


def test_the_end_of_a_journal_is_seen() -> None:
    story = whole_story()
    assert events.is_over(story.records)
    assert not events.is_over(story.records[:-1])
    assert not events.is_over(())
    assert not events.is_over(Story().records)
