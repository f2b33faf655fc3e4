"""Stored journals: each of their decisions is made again by today's rules."""

from pathlib import Path

import pytest

from orchestrator.core import events as ev
from orchestrator.core.actions import Outcome
from orchestrator.core.decide import decide
from orchestrator.core.fold import fold
from orchestrator.core.state import State
from orchestrator.supervisor.journal import read_records, render
from tests.replay.record import DATA, STORIES

JOURNALS = sorted(DATA.glob("*.jsonl"))

RULES_SEEN = {
    "three_kills": {
        "launch",
        "start",
        "no_capacity",
        "commit",
        "interval",
        "rank_or_node_lost",
        "restart_in_place",
        "spare_takes_over",
        "finished",
    },
    "hard_times": {
        "rank_or_node_lost",
        "slow_start",
        "restart_in_place",
        "spare_takes_over",
        "operator.snapshot",
        "operator.stop",
        "commit",
    },
    "moving_house": {
        "launch",
        "start",
        "move",
        "replace",
        "unhold",
        "ledger",
        "shrink",
        "grow",
        "give_back",
        "spare_takes_over",
        "finished",
    },
    "own_folders": {"launch", "start", "restart_in_place", "finished"},
}


def test_there_are_journals_to_replay() -> None:
    assert {path.stem for path in JOURNALS} >= STORIES.keys()


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_every_decision_of_a_stored_journal_is_made_again(path: Path) -> None:
    state = State()
    for record in read_records(path):
        if isinstance(record.event, ev.DecisionMade):
            again = decide(state, record.at, state.policy)
            assert again == (record.event.decision,), f"record {record.seq}"
        state = fold(state, record)
    assert state.over
    assert decide(state, state.at + 1e6, state.policy) == ()


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_a_stored_journal_shows_what_it_is_kept_for(path: Path) -> None:
    records = read_records(path)
    rules = {r.event.decision.rule for r in records if isinstance(r.event, ev.DecisionMade)}
    assert rules >= RULES_SEEN[path.stem]


@pytest.mark.parametrize("name", sorted(STORIES))
def test_the_stories_still_make_the_journals_that_are_stored(name: str) -> None:
    lines = b"".join(render(record) for record in STORIES[name]().records)
    assert lines == (DATA / f"{name}.jsonl").read_bytes(), (
        "if this is meant: python -m tests.replay.record"
    )


def test_the_outcomes_are_as_told() -> None:
    found = {}
    for path in JOURNALS:
        state = State()
        for record in read_records(path):
            state = fold(state, record)
        found[path.stem] = state.outcome
    assert found == {
        "three_kills": Outcome.FINISHED,
        "hard_times": Outcome.STOPPED,
        "moving_house": Outcome.FINISHED,
        "own_folders": Outcome.FINISHED,
    }


def test_the_watched_folder_committed_last_and_the_last_failure_are_read_back() -> None:
    state = State()
    for record in read_records(DATA / "own_folders.jsonl"):
        state = fold(state, record)
    folders = state.folders
    assert (folders.entry, folders.version, folders.nbytes) == ("checkpoint-2", 1, 4096)
    assert (folders.failed_entry, folders.failures) == ("checkpoint-2", 1)
    assert folders.removed == 1
    assert folders.committed_at is not None
    assert folders.committed_at > folders.failed_at
