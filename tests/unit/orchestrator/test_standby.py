"""`app.run` with a supervisor that is there already; nothing is supervised for real."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import app
from orchestrator.core.actions import Outcome
from orchestrator.core.state import State
from orchestrator.errors import AlreadyRunning, LeaseLost
from orchestrator.supervisor.lease import Holder, Lease, current_holder
from tests.unit.orchestrator.test_app import over, story

TOML = '[run]\nname = "small"\n[job]\ncommand = ["true"]\npreload = []\n'


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(f'{TOML}[nodes]\nmemory_dir = "{tmp_path}/memory"\n')
    return path


@pytest.fixture
def held(toml: Path) -> Lease:
    """The lease of a living supervisor."""
    return Lease.take(run_dir(toml) / "lease")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a supervisor began; each run that it supervises finishes at once."""
    times: list[int] = []

    def serve(_: object) -> State:
        times.append(1)
        return State(over=True, outcome=Outcome.FINISHED)

    monkeypatch.setattr(app, "serve", serve)
    return times


def run_dir(toml: Path) -> Path:
    return toml.parent / "runs" / "small"


def standing_by(toml: Path, then: Callable[[], object]) -> tuple[Outcome, list[int]]:
    """Stand by, and let something happen once the holder was named."""
    told: list[int] = []

    def said(holder: Holder) -> None:
        told.append(holder.epoch)
        then()

    return app.run(toml, standby=said), told


def ended(toml: Path, outcome: Outcome, lease: Lease) -> None:
    """What a supervisor does at the end of its run."""
    story(app.read(toml), *over(outcome))
    lease.release()


def test_without_standby_a_second_supervisor_is_refused_with_the_hint(
    toml: Path, held: Lease
) -> None:
    with pytest.raises(AlreadyRunning, match="--standby"):
        app.run(toml)


def test_records_behind_a_lost_lease_count_and_its_holder_is_deposed(
    toml: Path, held: Lease, served: list[int]
) -> None:
    """A person may remove the lease to get past `already supervised`."""
    story(app.read(toml))
    shutil.rmtree(run_dir(toml) / "lease")
    app.run(toml)
    holder = current_holder(run_dir(toml) / "lease")
    assert holder is not None
    assert holder.epoch == held.epoch + 1 == 2
    with pytest.raises(LeaseLost):
        held.check()


def test_a_standby_supervises_at_once_where_nobody_does(toml: Path, served: list[int]) -> None:
    assert standing_by(toml, lambda: None) == (Outcome.FINISHED, [])
    assert len(served) == 1


def test_a_standby_supervises_when_the_first_one_leaves_before_the_end(
    toml: Path, held: Lease, served: list[int]
) -> None:
    story(app.read(toml))
    assert standing_by(toml, held.release) == (Outcome.FINISHED, [1])
    assert len(served) == 1


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_standby_ends_with_the_run_and_starts_nothing(
    toml: Path, held: Lease, served: list[int], outcome: Outcome
) -> None:
    assert standing_by(toml, lambda: ended(toml, outcome, held)) == (outcome, [1])
    assert not served
    holder = current_holder(run_dir(toml) / "lease")
    assert holder is not None
    assert holder.released, "the next one need not wait"


def test_a_run_that_was_stopped_long_ago_is_taken_up_by_a_standby(
    toml: Path, held: Lease, served: list[int]
) -> None:
    """The supervisor of that time left no word that it released the lease."""
    story(app.read(toml), *over(Outcome.STOPPED))
    assert standing_by(toml, held.release) == (Outcome.FINISHED, [1])
    assert len(served) == 1


def test_a_standby_that_is_interrupted_leaves_everything_as_it_was(
    toml: Path, held: Lease, served: list[int]
) -> None:
    before = sorted(run_dir(toml).rglob("*"))
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        standing_by(toml, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is handler
    assert sorted(run_dir(toml).rglob("*")) == before
    assert not served


def test_a_deposed_supervisor_writes_nothing(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[Path, bytes] = {}

    def serve(_: object) -> State:
        (run_dir(toml) / "lease" / "epoch-00000002.json").write_text("{}")
        seen.update({p: p.read_bytes() for p in run_dir(toml).rglob("*") if p.is_file()})
        raise LeaseLost("epoch 1 is over")

    monkeypatch.setattr(app, "serve", serve)
    with pytest.raises(LeaseLost):
        app.run(toml)
    assert {p: p.read_bytes() for p in run_dir(toml).rglob("*") if p.is_file()} == seen


def test_what_became_of_a_run(toml: Path) -> None:
    assert app.outcome_of(run_dir(toml)) is None
    run_dir(toml).mkdir(parents=True)
    path = story(app.read(toml))
    assert app.outcome_of(run_dir(toml)) is None
    path.unlink()
    story(app.read(toml), *over(Outcome.FAILED))
    assert app.outcome_of(run_dir(toml)) is Outcome.FAILED
