"""The order of the rules, and what holds for every decision."""

import ast
import inspect
from pathlib import Path

import orchestrator.core.rules
from orchestrator.core import events as ev
from orchestrator.core.actions import Wait, kind_of
from orchestrator.core.decide import RULES, decide
from orchestrator.core.state import State
from tests.unit.core.story import POLICY, Story


def test_the_order_of_the_rules_is_deliberate() -> None:
    assert [rule.__name__ for rule in RULES] == [
        "commit",
        "stop_again",
        "stop",
        "stop_after_trouble",
        "stop_after_slow_start",
        "finished",
        "note",
        "quarantine",
        "user_error",
        "storage_error",
        "no_progress",
        "budget_spent",
        "history_unusable",
        "launch",
        "allocation_refused",
        "allocation_lost",
        "restart",
        "start",
        "move",
        "replace",
        "unhold",
        "give_back",
        "no_capacity",
        "disks",
        "snapshot",
        "pair",
        "interval",
        "prune",
    ]


def test_every_rule_in_the_folder_is_in_the_order() -> None:
    folder = Path(inspect.getfile(orchestrator.core.rules)).parent
    written = {
        node.name
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and [a.arg for a in node.args.args] == ["state", "now", "policy"]
        and not node.name.startswith("_")
    }
    assert written - {"upload_settled"} == {rule.__name__ for rule in RULES}


def test_nothing_is_decided_without_a_run() -> None:
    assert decide(State(), 0.0, POLICY) == ()


def test_nothing_is_decided_after_the_finish() -> None:
    story = Story(checkpoints=False).running(step=5).exits(0, 1, 2, 3)
    end = story.decides_one()
    story.uploads(5).loses("n1").says(ev.OperatorSaid(what="stop"))
    assert story.later(10_000).decides() == []
    assert story.done(end).decides() == []


def test_what_was_saved_is_committed_before_anything_else() -> None:
    story = Story().running(step=10).uploads(10).exits(0, code=-9)
    story.says(ev.OperatorSaid(what="stop"))
    assert [d.rule for d in story.decides()][:2] == ["commit", "operator.stop"]


def test_a_wait_is_said_once_until_its_reason_changes() -> None:
    story = Story().launched()
    assert isinstance(story.decides_one().action, Wait)
    assert story.later(1).decides() == []
    assert isinstance(story.joins("n1").decides_one().action, Wait)


def test_decide_gives_the_same_answer_to_the_same_question() -> None:
    story = Story().running(step=10).exits(0, code=-9)
    assert story.next() == story.next()


def test_keys_name_run_attempt_and_kind() -> None:
    story = Story().running(step=10).uploads(10).exits(0, code=-9)
    commit, stop = story.decides()
    assert commit.key.startswith("r/1/commit/")
    assert stop.key == "r/1/stop_ranks/1"
    assert kind_of(Wait()) == "wait"
