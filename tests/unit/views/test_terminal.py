import io

import pytest
from rich.console import Console

from orchestrator.views import replay as replaying
from orchestrator.views import report as reporting
from orchestrator.views import tables, why
from orchestrator.views.history import History
from orchestrator.views.live import LiveView, PlainView
from orchestrator.views.status import status
from tests.unit.views.story import Story, restamp, whole_story


def console(width: int = 160) -> Console:
    return Console(
        width=width, file=io.StringIO(), markup=False, highlight=False, force_terminal=False
    )


def text(view, width: int = 160) -> str:
    to = console(width)
    to.print(view)
    return to.file.getvalue()


def body_of(story: Story):
    state, history = History.of(story.records)
    return status(state, history, story.at)


@pytest.mark.parametrize("width", [60, 80, 124, 200])
def test_status_shows_incidents_with_phases_at_any_width(width: int) -> None:
    shown = text(tables.status_view(body_of(whole_story())), width)
    assert "moe-demo" in shown
    for word in ("SIGKILL", "spare takes over", "first step", "steps lost"):
        assert word in " ".join(shown.split())
    assert all(len(line) <= width for line in shown.splitlines())


def test_status_of_a_run_that_just_began_can_be_shown() -> None:
    shown = text(tables.status_view(body_of(Story())))
    assert "no step yet" in shown
    assert "none committed yet" in shown


def test_progress_claims_nothing_that_was_not_measured() -> None:
    measured = {"step": 7, "loss": None, "step_s": None, "tokens_per_s": None}
    assert tables.progress_words({**measured, "last_step_age_s": None}) == "step 7"


def test_the_report_names_goodput_and_where_the_time_went() -> None:
    body = reporting.as_json(reporting.build(whole_story().records, ()))
    shown = text(tables.report_view(body))
    assert "lost work" in shown
    assert "without a supervisor for 2.0 s" in shown


def test_why_is_shown_in_words() -> None:
    story = whole_story()
    record = why.find(story.state, story.records, incident=2)
    assert record is not None
    shown = text(tables.why_view(why.explain(story.state, story.records, record)))
    assert "spare_takes_over" in shown
    assert "node-2 is gone" in shown
    assert "first new step" in shown


def test_square_brackets_of_a_run_are_shown_as_they_are() -> None:
    body = body_of(Story().launch().train(3))
    body["headline"] = "[red]not markup[/red] [/]"
    assert "[red]not markup[/red] [/]" in text(tables.status_view(body))


def test_replay_shows_both_reasons() -> None:
    records = list(whole_story().records)
    place = next(k for k, r in enumerate(records) if "Launch" in repr(r.event))
    records[place] = restamp(records[place], "because of the moon")
    shown = text(tables.replay_view(replaying.as_json(replaying.replay(records))))
    assert "1 difference" in shown
    assert "because of the moon" in shown
    assert "2 nodes and 1 spare" in shown


def test_the_live_view_draws_at_every_moment_of_a_run() -> None:
    records = whole_story().records
    to = Console(width=100, file=io.StringIO(), force_terminal=True, markup=False)
    state, history = History.of(())
    with LiveView(to, now=lambda: 0.0) as view:
        for length in range(0, len(records), 40):
            state, history = History.of(records[:length])
            view.show(state, history, records[max(0, length - 40) : length])
            to.print(view.render())
    shown = to.file.getvalue()
    assert "verdict on attempt 1" in shown
    assert "moe-demo" in shown


def test_plain_lines_tell_the_story_without_routine() -> None:
    lines: list[str] = []
    records = whole_story().records
    state, history = History.of(records)
    with PlainView(lines.append) as view:
        view.show(state, history, records)
    told = "\n".join(lines)
    assert "verdict on attempt 1: rank 3 on node-2 was killed by SIGKILL" in told
    assert "decided to commit" not in told
    assert len(lines) < len(records) / 3
