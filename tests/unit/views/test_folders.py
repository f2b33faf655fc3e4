"""What is told of watched folders."""

from collections.abc import Iterator

import pytest
from prometheus_client.core import Metric

from orchestrator.core.events import FolderStep, FolderWatched
from orchestrator.core.folders import Folders
from orchestrator.views.events import describe
from orchestrator.views.folders import failure_words, families, folders_json, last_words

KEPT = Folders(entry="checkpoint-2", version=1, nbytes=4096, committed_at=100.0)
FAILED = Folders(failure="no answer", failed_entry="checkpoint-3", failed_at=150.0, failures=2)


def values(found: Iterator[Metric]) -> dict[str, float]:
    return {sample.name: sample.value for family in found for sample in family.samples}


def test_the_folder_committed_last_and_its_age_are_told() -> None:
    body = folders_json(KEPT, 160.0)
    assert last_words(body) == "checkpoint-2, 1 min 00 s ago (4.0 KiB)"
    assert failure_words(body) == ""
    found = values(families(KEPT, "r", over=False, now=160.0))
    assert found["everstep_folder_age_seconds"] == 60.0
    assert found["everstep_folder_bytes"] == 4096.0
    assert found["everstep_folder_failures_total"] == 0.0


def test_a_failure_is_told_and_nothing_kept_is_no_age_of_zero() -> None:
    body = folders_json(FAILED, 160.0)
    assert last_words(body) == "none committed yet"
    assert failure_words(body) == "10 s ago: checkpoint-3: no answer"
    found = values(families(FAILED, "r", over=False, now=160.0))
    assert "everstep_folder_age_seconds" not in found
    assert found["everstep_folder_failures_total"] == 2.0


def test_an_unknown_age_is_left_out() -> None:
    body = folders_json(Folders(entry="c", nbytes=1), 160.0)
    assert body["age_s"] is None
    assert last_words(body) == "c (1 B)"


@pytest.mark.parametrize("step", FolderStep)
def test_every_step_has_words(step: FolderStep) -> None:
    assert "folder c-1" in describe(FolderWatched(node="n1", entry="c-1", step=step))
