"""What keeps a supervisor running inside its job, without a supervisor and without Slurm."""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import supervisor_job
from orchestrator.core.actions import Outcome
from orchestrator.errors import JournalCorrupt
from orchestrator.exit_codes import ExitCode
from orchestrator.launch.slurm_commands import SlurmUnavailable
from orchestrator.supervisor_job import Keeper

PATIENCE_S = 30.0


class FakeRun:
    """A run directory, and supervisors that end with given codes."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = run_dir / "journal.jsonl"
        self.journal.write_text("a record\n")
        self.outcome: Outcome | None = None
        self.codes: Iterator[int] = iter(())
        self.started = 0
        self.keeper = Keeper(run_dir / "supervisor", "7")
        monkeypatch.setattr(supervisor_job, "outcome_of", lambda _: self.outcome)
        monkeypatch.setattr(supervisor_job, "AGAIN_S", (0.0,))
        monkeypatch.setattr(supervisor_job, "POLL_S", 0.001)
        monkeypatch.setattr(self.keeper, "_supervise", self._supervise)

    def _supervise(self) -> int:
        self.started += 1
        return next(self.codes)

    def ends(self, *codes: int, is_first: bool = True) -> int:
        self.codes = iter(codes)
        return self.keeper.run(is_first=is_first)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    return FakeRun(tmp_path, monkeypatch)


@pytest.mark.parametrize("code", [0, 1, 2, 5, 6, 130])
def test_a_supervisor_with_nothing_more_to_do_ends_the_job(fake: FakeRun, code: int) -> None:
    assert fake.ends(code) == code
    assert fake.started == 1


def test_a_crash_a_kill_a_lost_lease_and_a_store_that_is_away_are_followed_by_another(
    fake: FakeRun,
) -> None:
    assert fake.ends(70, -9, 4, 3, 3, 3, 0) == 0
    assert fake.started == 7


@pytest.mark.parametrize(("code", "shown"), [(3, 3), (70, 70), (-9, 137)])
def test_a_run_that_never_began_is_not_tried_again(fake: FakeRun, code: int, shown: int) -> None:
    fake.journal.write_text("")
    assert fake.ends(code) == shown
    fake.journal.unlink()
    assert fake.ends(code) == shown


@pytest.mark.parametrize(
    ("outcome", "code"), [(Outcome.FINISHED, 0), (Outcome.FAILED, 1), (Outcome.STOPPED, 6)]
)
def test_a_run_that_is_over_does_not_begin_anew_when_slurm_starts_the_job_again(
    fake: FakeRun, outcome: Outcome, code: int
) -> None:
    fake.outcome = outcome
    assert fake.ends(is_first=False) == code
    assert fake.started == 0
    assert fake.ends(0) == 0, "but a first start takes a stopped run up"
    assert fake.started == 1


def test_a_run_that_ended_as_its_supervisor_crashed_is_over(fake: FakeRun) -> None:
    def crashes() -> int:
        fake.outcome = Outcome.FAILED
        return -9

    fake.keeper._supervise = crashes  # type: ignore[method-assign]
    assert fake.keeper.run(is_first=True) == ExitCode.RUN_FAILED


def test_a_journal_that_cannot_be_read_is_the_supervisors_to_report(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(_: Path) -> Outcome | None:
        raise JournalCorrupt("line 3")

    monkeypatch.setattr(supervisor_job, "outcome_of", corrupt)
    assert fake.ends(70, 70, 0) == 0


def test_between_two_supervisors_sigterm_is_obeyed(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_job, "AGAIN_S", (3600.0,))
    threading.Timer(0.1, fake.keeper.end).start()
    assert fake.ends(70) == ExitCode.INTERRUPTED
    assert fake.started == 1


def test_slurm_is_asked_to_start_the_job_again_until_it_answers(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, calls = [], itertools.count()

    def requeue(job: str) -> None:
        asked.append(job)
        if next(calls) < 2:
            raise SlurmUnavailable("timed out")

    monkeypatch.setattr(supervisor_job, "requeue", requeue)
    monkeypatch.setattr(supervisor_job, "REQUEUE_EVERY_S", 0.01)
    fake.keeper.time_is_up()
    deadline = time.monotonic() + PATIENCE_S
    while len(asked) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert asked == ["7", "7", "7"]
