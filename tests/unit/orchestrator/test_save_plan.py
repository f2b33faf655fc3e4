import tomllib
from pathlib import Path

import pytest

from checkpointing.environment import RankEnvironment, StagePolicy
from checkpointing.retention import RetentionPolicy
from checkpointing.store.base import StoreConfig
from orchestrator.agent.environment import RankPaths, job_spec, rank_environment
from orchestrator.config import RunConfig, freeze, parse, thaw
from orchestrator.views.save_plan import keeping_words, saving_words
from tests.unit.orchestrator.test_environment import ORDER

PATHS = RankPaths(slot=Path("/m/slot"), arena=Path("/m/arena"), log=Path("/l"))
STORE = 'store = "file:///s"\n'
KEEP = STORE + "[checkpoint.keep]\n"


def config(lines: str) -> RunConfig:
    head = '[run]\nname = "r"\n[job]\ncommand = ["true"]\n[checkpoint]\n'
    return parse(tomllib.loads(head + lines), "run.toml")


def ranks_of(made: RunConfig) -> RankEnvironment:
    found = RankEnvironment.read(rank_environment({}, job_spec(made, "n1"), ORDER, 0, PATHS))
    assert found is not None
    return found


def test_what_the_file_says_of_saving_reaches_ranks_and_uploader() -> None:
    lines = 'stage_policy = "wait"\nstage_wait_s = 7\non_other_world = "fresh"\n'
    rank = ranks_of(config(STORE + lines + "max_bytes_per_s = 2e8"))
    assert (rank.policy, rank.policy_wait_s) == (StagePolicy.WAIT, 7.0)
    assert rank.on_other_world == "fresh"
    assert StoreConfig.from_json(rank.store).max_bytes_per_s == 2e8


def test_unless_told_nothing_waits_is_dropped_held_back_or_deleted() -> None:
    made = config(STORE)
    rank = ranks_of(made)
    assert (rank.policy, rank.on_other_world) == (StagePolicy.SKIP, "refuse")
    assert StoreConfig.from_json(rank.store).max_bytes_per_s is None
    assert made.checkpoint.keep is None


def test_a_table_of_rules_is_a_policy() -> None:
    made = config(KEEP + "last = 5\nages_s = 0\naverage_last = 4\naverage_every_tokens = 1000000")
    assert made.checkpoint.keep is not None
    assert made.checkpoint.keep.policy() == RetentionPolicy(
        keep_last=5, ages_s=0.0, average_last=4, average_every_tokens=1_000_000
    )
    empty = config(KEEP).checkpoint.keep
    assert empty is not None
    assert empty.policy() == RetentionPolicy()


def test_a_frozen_run_keeps_its_rules(tmp_path: Path) -> None:
    made = config(STORE + 'stage_policy = "replace"\n[checkpoint.keep]\nlast = 9')
    freeze(made, tmp_path / "run.json")
    assert thaw(tmp_path / "run.json") == made


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "nothing"),
        (STORE, "every 100 steps at first, then as measured; a save that finds uploads running is"),
        (
            STORE,
            "is skipped; a node sends as fast as it can; the own state of ranks is for as many",
        ),
        (STORE + 'stage_policy = "wait"', "waits up to 1 min 00 s for it"),
        (STORE + 'stage_policy = "replace"', "takes the place of one that nobody began to send"),
        (STORE + "max_bytes_per_s = 2e7", "at most 20 MB/s"),
        (STORE + 'on_other_world = "fresh"', "begins afresh"),
    ],
)
def test_check_says_how_a_run_saves(lines: str, words: str) -> None:
    assert words in saving_words(config(lines).checkpoint)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "nothing"),
        (STORE, "all: nothing is deleted"),
        (KEEP + "last = 4\nages_s = 0", "the last 4; those in quarantine for 7 d 00 h; the two"),
        (KEEP + "every_steps = 1000", "the first of every 1,000 steps"),
        (KEEP, "two for each age of 1 h 00 min, 2 times that, ..."),
        (
            KEEP + "average_every_tokens = 1000000000\naverage_last = 4",
            "the first of every 1,000,000,000 tokens for averages, the last 4 of them",
        ),
    ],
)
def test_check_says_what_is_kept(lines: str, words: str) -> None:
    assert words in keeping_words(config(lines).checkpoint)
