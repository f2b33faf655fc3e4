"""What is known of watched folders after each event."""

from orchestrator.core.codec import decode_event
from orchestrator.core.events import FolderStep, FolderWatched
from orchestrator.core.folders import Folders, watched

NAN = float("nan")


def after(*told: tuple[str, FolderStep, float, float]) -> Folders:
    folders = Folders()
    for entry, step, age_s, at in told:
        event = FolderWatched(node="n", entry=entry, step=step, age_s=age_s)
        folders = watched(folders, event, at)
    return folders


def test_the_commit_made_last_is_the_newest_whoever_tells_of_it_last() -> None:
    found = after(
        ("c-2", FolderStep.COMMITTED, 0.0, 100.0),
        ("c-1", FolderStep.KNOWN, 60.0, 110.0),
    )
    assert (found.entry, found.committed_at) == ("c-2", 100.0)
    found = after(
        ("c-1", FolderStep.KNOWN, 60.0, 100.0),
        ("c-2", FolderStep.KNOWN, 30.0, 100.0),
    )
    assert (found.entry, found.committed_at) == ("c-2", 70.0)


def test_a_commit_of_an_earlier_step_that_was_made_later_is_the_newest() -> None:
    found = after(
        ("c-9", FolderStep.COMMITTED, 0.0, 100.0),
        ("c-5", FolderStep.COMMITTED, 0.0, 200.0),
    )
    assert found.entry == "c-5"


def test_a_commit_of_unknown_age_is_none_of_now() -> None:
    found = after(("c-1", FolderStep.KNOWN, NAN, 100.0))
    assert (found.entry, found.committed_at) == ("c-1", None)
    found = after(("c-2", FolderStep.COMMITTED, 0.0, 100.0), ("c-1", FolderStep.KNOWN, NAN, 110.0))
    assert found.entry == "c-2"
    found = after(("c-1", FolderStep.KNOWN, NAN, 100.0), ("c-2", FolderStep.COMMITTED, 0.0, 110.0))
    assert found.entry == "c-2"


def test_an_event_of_an_old_journal_lacks_what_came_later() -> None:
    least = {"is": "FolderWatched", "node": "n", "entry": "c-1", "step": "committed"}
    event = decode_event(least)
    assert watched(Folders(), event, 5.0).committed_at == 5.0  # type: ignore[arg-type]
