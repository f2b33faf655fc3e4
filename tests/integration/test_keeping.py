"""A run that deletes by its own rules, and one whose newest checkpoint is damaged in the store."""

from pathlib import Path

import pytest

from checkpointing import keys
from checkpointing.content import content_sha256
from checkpointing.quarantine import list_quarantined, quarantine
from checkpointing.resolver import list_commits
from checkpointing.store.directory import DirectoryStore
from deploy.demo.run import Run
from orchestrator.app import ask
from orchestrator.core.actions import Outcome, Prune, Quarantine
from orchestrator.core.events import ActionDone, CatalogueRead, CheckpointCommitted, DecisionMade
from orchestrator.supervisor.journal import read_records
from tests.integration.conftest import MakeRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DATA = Path(__file__).parents[1] / "data"
COMMAND = ["python", "short_saving_job.py", "1000000", "0.03"]


def started(make_run: MakeRun, name: str, store: Path, checkpoint: str = "") -> Run:
    run = make_run(
        name,
        COMMAND,
        nodes=1,
        spares=0,
        ranks=1,
        interval=10,
        store=store,
        workdir=DATA,
        checkpoint=checkpoint,
    )
    run.start()
    return run


def stopped(run: Run) -> None:
    ask(run.config.run_dir, "stop")
    run.wait("the end", lambda state: state.over)
    assert run._process is not None
    run._process.wait(60.0)
    run.records = ()  # the next start begins another journal
    assert run.state.outcome is Outcome.STOPPED


def test_a_run_deletes_what_no_rule_keeps_and_goes_on(make_run: MakeRun, tmp_path: Path) -> None:
    keep = "[checkpoint.keep]\nlast = 3\nages_s = 0\nevery_steps = 100"
    run = started(make_run, "keeping", tmp_path / "store", keep)
    run.wait("something deleted", lambda state: state.deleted >= 3)
    stopped(run)
    records = read_records(run.config.run_dir / "journal.jsonl")
    pruned = [
        r.event.decision
        for r in records
        if isinstance(r.event, DecisionMade) and isinstance(r.event.decision.action, Prune)
    ]
    gone = {place for decision in pruned for place in decision.action.places}
    told = {r.event.key: r.event for r in records if isinstance(r.event, ActionDone)}
    assert any(told[d.key].ok and "freed" in told[d.key].detail for d in pruned if d.key in told)
    committed = [
        (r.event.step, r.event.attempt) for r in records if isinstance(r.event, CheckpointCommitted)
    ]
    assert (10, 1) not in gone, "the first of the first 100 steps is kept for ever"
    assert gone < set(committed[:-3])

    store = DirectoryStore(tmp_path / "store")
    left = [commit.place for commit in list_commits(store, "keeping")]
    assert left == sorted(set(committed) - gone, reverse=True)
    for step, attempt in gone:
        assert store.list(keys.data_prefix("keeping", step, attempt)) == ()
    for step, _ in left:
        assert content_sha256(store, "keeping", step)["all"]
    costs = [r.event.cost for r in records if isinstance(r.event, CheckpointCommitted)]
    measured = [cost for cost in costs if cost is not None and cost.stall_s == cost.stall_s]
    assert len(measured) >= len(costs) - 1, "what each save cost is known"
    assert measured[-1].upload_bytes_per_s
    assert measured[-1].stage_bytes_per_s
    assert measured[-1].tokens == 8 * committed[-1][0]


def test_no_run_resumes_from_a_checkpoint_that_is_damaged_or_condemned(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = started(make_run, "spoilt", tmp_path / "store")
    run.wait("three checkpoints", lambda state: len(state.commits) >= 3)
    stopped(run)
    store = DirectoryStore(tmp_path / "store")
    condemned, damaged, sound, *_ = (commit.place for commit in list_commits(store, "spoilt"))
    quarantine(store, "spoilt", *condemned, why="its loss went up", who="a person")
    path = tmp_path / "store" / keys.data_key("spoilt", *damaged, 0)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    run.start()
    run.wait("a later one", lambda state: bool(state.commits) and state.commits[0] > condemned)
    assert run.state.attempt is not None
    assert run.state.attempt.restore is not None
    restore = run.state.attempt.restore
    assert (restore.step, restore.attempt) == sound
    records = read_records(run.config.run_dir / "journal.jsonl")
    (read,) = [r.event for r in records if isinstance(r.event, CatalogueRead)]
    assert read.quarantined == (condemned,)
    (found,) = [
        r.event.decision.action
        for r in records
        if isinstance(r.event, DecisionMade) and isinstance(r.event.decision.action, Quarantine)
    ]
    assert (found.step, found.attempt) == damaged
    by_person, by_run = list_quarantined(store, "spoilt")
    assert (by_person.place, by_run.place) == (condemned, damaged)
    assert "CRC" in by_run.why
