import json

from orchestrator.core import events as ev
from orchestrator.views.replay import as_json, replay
from tests.unit.views.story import restamp, whole_story


def test_a_run_replays_to_the_same_decisions() -> None:
    result = replay(whole_story().records)
    assert result.differences == ()
    assert result.decisions > 10


def test_a_changed_reason_is_a_difference() -> None:
    records = list(whole_story().records)
    place = next(k for k, r in enumerate(records) if isinstance(r.event, ev.DecisionMade))
    records[place] = restamp(records[place], "for no good reason")
    (difference,) = replay(records).differences
    assert difference.seq == records[place].seq
    assert difference.fields == ("reason",)
    assert json.dumps(as_json(replay(records)), allow_nan=False)


def test_a_decision_that_would_not_be_made_is_a_difference() -> None:
    records = list(whole_story().records)
    died = next(k for k, r in enumerate(records) if isinstance(r.event, ev.RankExited))
    del records[died]
    first = replay(records).differences[0]
    assert first.derived is None
    assert first.fields == ("everything",)
