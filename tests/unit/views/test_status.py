import io
import json

import pytest
from rich.console import Console

from monitors.faults import FaultKind
from orchestrator.core import events as ev
from orchestrator.views.history import History
from orchestrator.views.status import status
from orchestrator.views.tables import status_rows, status_view
from tests.unit.views.story import Story, whole_story


def of(story: Story, later_s: float = 0.0):
    state, history = History.of(story.records)
    return status(state, history, story.at + later_s)


def test_status_is_json_without_nan_at_every_moment() -> None:
    records = whole_story().records
    for length in range(0, len(records), 23):
        state, history = History.of(records[:length])
        json.dumps(status(state, history, state.at), allow_nan=False)


def test_a_training_run_says_step_loss_checkpoint_and_nodes() -> None:
    body = of(Story().launch().train(50), later_s=7.0)
    assert body["phase"] == "running"
    assert body["progress"]["step"] == 50
    assert body["checkpoints"]["newest_step"] == 40
    assert body["checkpoints"]["age_s"] > 7.0
    assert [n["state"] for n in body["nodes"]] == ["training", "training", "spare"]
    assert body["nodes"][1]["ranks"] == [2, 3]
    assert body["headline"].startswith("training: attempt 1 on node-1 and node-2")


def test_the_interval_says_why_it_moved() -> None:
    before = of(Story().launch())
    assert before["checkpoints"]["interval_why"] == "as the run asked for"
    after = of(Story().launch().train(50))
    assert after["checkpoints"]["interval_steps"] == 40
    assert "20 -> 40 steps" in after["checkpoints"]["interval_why"]


def test_a_lost_node_says_why() -> None:
    body = of(Story().launch().train(50).lose_node())
    lost = next(n for n in body["nodes"] if n["name"] == "node-2")
    assert lost["state"] == "lost"
    assert "connection broke" in lost["why"]


def test_a_waiting_run_says_what_it_waits_for() -> None:
    story = Story()
    story.add(ev.CatalogueRead(commits=()))
    (launch, *_) = story.decide()
    story.done(launch, detail="7")
    story.decide()
    assert of(story)["headline"] == "waiting for nodes: 0 of 2 are usable"


def test_budget_left_is_what_was_not_spent() -> None:
    story = Story().launch().train(50).kill_rank()
    left = {b["class"]: b["left"] for b in of(story)["budget"]}
    assert left == {"node": 3, "process": 4, "storage": 2}


def test_a_restart_that_counts_no_more_is_shown_as_forgiven() -> None:
    story = whole_story()
    forgiven = {b["class"]: b["forgiven"] for b in of(story)["budget"]}
    assert sum(forgiven.values()) == sum(i.forgiven for i in story.state.incidents) > 0
    rows = dict(status_rows(of(story)))
    assert " (1 forgiven)" in str(rows["restarts left"])


def test_what_was_not_measured_is_none_and_not_zero() -> None:
    body = of(Story())
    assert body["progress"]["loss"] is None
    assert body["progress"]["step"] is None
    assert body["checkpoints"]["age_s"] is None
    assert body["goodput"]["ratio"] is None
    assert body["attempt"] is None


def test_the_curve_has_each_step_once_in_order_and_ends_at_the_last() -> None:
    steps = [step for step, _ in of(whole_story())["curve"]]
    assert steps == sorted(set(steps))
    assert steps[-1] == 300


def test_a_finished_run_has_released_its_nodes() -> None:
    body = of(Story().launch().train(20).finish())
    assert body["outcome"] == "finished"
    assert {n["state"] for n in body["nodes"]} == {"released"}


@pytest.mark.parametrize("alive", [True, False, None])
def test_what_nobody_supervises_is_said_first(alive: bool | None) -> None:
    state, history = History.of(Story().launch().train(50).records)
    shown = io.StringIO()
    body = status(state, history, state.at, {"url": "http://x", "alive": alive})
    Console(width=120, file=shown).print(status_view(body))
    second = shown.getvalue().splitlines()[1]
    assert second.startswith("no supervisor answers" if alive is False else "training: attempt 1")


def test_the_incident_that_ended_a_run_has_the_end_as_its_decision() -> None:
    story = Story().launch().train(50)
    exited = story.add(
        ev.RankExited(attempt=1, node="node-1", rank=0, code=1, ours=False, age_s=0.1)
    )
    (stop,) = story.decide()
    story._rest_exits(("node-1", "node-2"))
    story.done(stop)
    story.judge(FaultKind.USER_ERROR, "ValueError: my bug", (exited.seq,))
    body = of(story)
    assert body["outcome"] == "failed"
    assert body["incidents"][-1]["decision"] == "the run ended"
    assert body["incidents"][-1]["reason"] == body["outcome_reason"] != ""


def test_copies_that_fail_are_told_in_one_line_and_only_then() -> None:
    story = Story().launch().train(50)

    def said() -> str:
        found = [str(value) for name, value in status_rows(of(story)) if name == "copies fail"]
        return " ".join(found)

    def tells(node: str, problem: str) -> None:
        story.add(ev.Replicated(node=node, address="a:1", replicas=(), problem=problem))

    assert said() == ""
    tells("node-1", "to its disk: no room")
    assert said() == "from node-1 to its disk: no room"
    tells("node-2", "to its buddy: no answer")
    assert said() == "from node-1 to its disk: no room (and from 1 more node)"
    tells("node-1", "")
    tells("node-2", "")
    assert said() == ""
