import json

from orchestrator.core import events as ev
from orchestrator.views import why
from orchestrator.views.history import History
from tests.unit.views.story import Story, whole_story


def explained(story: Story, **which: int):
    state, _ = History.of(story.records)
    record = why.find(state, story.records, **which)
    assert record is not None
    return why.explain(state, story.records, record)


def test_a_restart_names_cause_evidence_rule_and_what_came_of_it() -> None:
    body = explained(whole_story(), incident=1)
    assert body["cause"] == "rank 3 on node-2 was killed by SIGKILL"
    assert body["rule"] == "restart_in_place"
    assert any("ended by SIGKILL" in line["text"] for line in body["evidence"])
    assert body["outcome"][-2]["text"] == "attempt 2: first new step, 41, is done"
    seen = [line["seq"] for line in body["outcome"]]
    assert seen == sorted(seen)
    json.dumps(body, allow_nan=False)


def test_without_a_question_the_last_decision_that_matters_is_explained() -> None:
    body = explained(Story().launch().train(75).kill_rank().up().train(82))
    assert body["decision"].startswith("start attempt 2") or "checkpoint every" in body["decision"]


def test_a_decision_is_found_by_its_number() -> None:
    story = whole_story()
    stop = next(r for r in why.decisions(story.records) if "StopRanks" in repr(r.event))
    body = explained(story, seq=stop.seq)
    assert body["seq"] == stop.seq
    assert len(body["outcome"]) == 4  # three ranks ended, one action done


def test_an_unknown_number_finds_nothing() -> None:
    story = whole_story()
    assert why.find(story.state, story.records, seq=1) is None
    assert why.find(story.state, story.records, incident=9) is None


def test_nothing_happens_because_all_is_well() -> None:
    assert why.idle(Story().launch().train(5).state)["idle"] == (
        "nothing needs doing: all ranks are training"
    )


def test_nothing_happens_because_nodes_are_missing() -> None:
    story = Story()
    story.add(ev.CatalogueRead(commits=()))
    (launch, *_) = story.decide()
    story.done(launch, detail="7")
    story.decide()
    assert why.idle(story.state)["idle"] == "it waits: waiting for nodes: 0 of 2 are usable"


def test_nothing_happens_because_a_rank_has_not_stopped_yet() -> None:
    records = Story().launch().train(5).kill_rank().records
    stop = next(r for r in records if "StopRanks" in repr(r.event))
    state, _ = History.of(records[: stop.seq])
    assert why.idle(state)["idle"] == "waiting for rank 0, 1, 2 to stop"


def test_a_finished_run_says_how_it_ended() -> None:
    assert why.idle(whole_story().state)["idle"].startswith("finished: all 4 ranks finished")
    assert why.idle(whole_story().state)["pending"] == []
