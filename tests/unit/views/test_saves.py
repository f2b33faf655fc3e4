from dataclasses import replace
from typing import Any

from orchestrator.core import events as ev
from orchestrator.views import tables
from orchestrator.views.history import History
from orchestrator.views.saves import saving_bar
from orchestrator.views.status import status
from tests.unit.views.story import Story
from tests.unit.views.test_terminal import text

CELLS = 24


def checkpoints(story: Story) -> dict[str, Any]:
    state, history = History.of(story.records)
    found = status(state, history, story.at)["checkpoints"]
    assert isinstance(found, dict)
    return found


def upload(story: Story, step: int, *ranks: int) -> None:
    for rank in ranks:
        story.add(
            ev.ShardUploaded(
                attempt=1,
                step=step,
                rank=rank,
                world=4,
                index_key="k",
                index_crc64=0,
                nbytes=3_500_000,
                upload_s=0.2,
            )
        )


def test_the_bar_follows_a_save_from_memory_to_its_commit() -> None:
    story = Story().launch()
    assert saving_bar(checkpoints(story)).plain == "none yet"
    story.train(20, saves=False)
    story.stage(20)
    bar = saving_bar(checkpoints(story)).plain
    assert bar == "\u2588" * CELLS + "  step 20: staged 4 of 4 ranks"
    upload(story, 20, 0)
    found = checkpoints(story)["saving"]
    assert found == {
        "step": 20,
        "world": 4,
        "staged_ranks": 4,
        "uploaded_ranks": 1,
        "uploaded_bytes": 3_500_000,
    }
    bar = saving_bar(checkpoints(story))
    assert bar.plain.endswith("step 20: uploaded 1 of 4 ranks, 3.3 MiB")
    assert [(span.style, span.end - span.start) for span in bar.spans[:1]] == [
        ("blue", CELLS - CELLS // 4)
    ]
    assert bar.plain.count("\u2588") == CELLS
    upload(story, 20, 1, 2, 3)
    assert saving_bar(checkpoints(story)).plain.endswith("13.4 MiB in the store, committing")


def test_between_saves_the_bar_says_how_old_the_newest_is_and_how_fast_it_went() -> None:
    story = Story().launch().train(25)
    story.at += 60.0
    bar = saving_bar(checkpoints(story)).plain
    assert bar.startswith("\u2588" * CELLS + "  step 20 committed 1 min ")
    assert bar.endswith("ago, 70 MB/s")


def test_a_save_under_way_does_not_hide_the_age_of_the_newest_commit() -> None:
    story = Story().launch().train(25)
    story.train(39)
    story.stage(40)
    upload(story, 40, 3)
    bar = saving_bar(checkpoints(story)).plain
    assert "step 40: uploaded 1 of 4 ranks" in bar
    assert "; committed step 20 " in bar


def test_snapshots_of_an_attempt_that_is_over_are_no_save_under_way() -> None:
    story = Story().launch().train(25)
    story.stage(24)
    story.kill_rank()
    assert story.state.attempt is not None
    assert story.state.attempt.number == 2
    assert checkpoints(story)["saving"] is None


def test_status_says_what_the_last_save_cost_and_which_saves_came_to_nothing() -> None:
    story = Story().launch().train(25)
    last = [r.event for r in story.records if isinstance(r.event, ev.Progress)][-1]
    story.add(replace(last, min_step=26, skipped_saves=2, dropped_saves=1))
    state, history = History.of(story.records)
    shown = " ".join(text(tables.status_view(status(state, history, story.at))).split())
    assert "stall 30 ms, staged at 2.00 GB/s, uploaded at 70 MB/s" in shown
    assert "2 requests made again (SlowDown 2)" in shown
    assert "2 saves skipped, uploads are too slow, 1 save dropped" in shown
