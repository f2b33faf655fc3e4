from dataclasses import replace

from orchestrator.core.fold import fold
from orchestrator.core.state import State
from orchestrator.views import history as module
from orchestrator.views.history import History
from tests.unit.views.story import Story, whole_story


def test_seeing_records_one_by_one_is_the_same_as_reading_the_journal() -> None:
    records = whole_story().records
    state, live = State(), History()
    for record in records:
        state = fold(state, record)
        live.see(record, state)
    stored_state, stored = History.of(records)
    assert state == stored_state
    assert live.attempts == stored.attempts
    assert live.points == stored.points
    assert live.commits == stored.commits


def test_long_progress_is_thinned_and_keeps_its_ends(monkeypatch) -> None:
    monkeypatch.setattr(module, "KEPT_POINTS", 16)
    story = Story().launch().train(200)
    _, history = History.of(story.records)
    points = history.points[1]
    assert len(points) <= 17
    assert (points[0].step, points[-1].step) == (2, 200)


def test_the_last_step_is_dated_by_its_first_report() -> None:
    story = Story().launch().train(10)
    at = story.at
    last = story.records[-1]
    story.add(replace(last.event), after=9.0)
    _, history = History.of(story.records)
    assert history.last_step_at() == at


def test_presence_ends_when_the_node_fell_silent() -> None:
    story = Story().launch().train(30).lose_node()
    _, history = History.of(story.records)
    ((since, until),) = history.presence["node-2"]
    assert until is not None
    assert since < until < story.at
    assert history.presence["node-1"][0][1] is None


def test_the_first_supervisor_was_never_away() -> None:
    _, history = History.of(Story().launch().records)
    assert history.away == []
