"""The ledger's file: damage, a full disk, a frozen neighbour, being asked twice."""

import fcntl
import os
import resource
import signal
from pathlib import Path

import pytest

from orchestrator import ledger as module
from orchestrator.core.codec import encode
from orchestrator.core.ledger import Entry, NodeExcluded, NodeIncident, NodeIncluded
from orchestrator.errors import LedgerUnavailable
from orchestrator.exit_codes import ExitCode
from orchestrator.ledger import FILE_NAME, TEXT_MAX, Ledger
from orchestrator.sealed_line import seal


def incident(number: int = 1, at: float = 5.0, node: str = "n1", run: str = "moe") -> NodeIncident:
    return NodeIncident(
        at=at, node=node, run=run, incident=number, fault="gpu", cause="Xid 79", excluded_s=60.0
    )


EXCLUDE = NodeExcluded(at=6.0, node="n2", by="ada", why="fan broken")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger(path)


def noted(path: Path, *entries: Entry) -> bytes:
    for entry in entries:
        Ledger(path).note(entry)
    return path.read_bytes()


def test_no_file_is_an_empty_ledger_and_reading_makes_none(ledger: Ledger, path: Path) -> None:
    assert ledger.entries() == ()
    assert not path.exists()


def test_what_others_write_is_seen_and_an_unchanged_file_is_not_read_again(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    real = module._read_from
    monkeypatch.setattr(module, "_read_from", lambda fd, at: reads.append(at) or real(fd, at))
    first = noted(path, incident())
    assert ledger.entries() == (incident(),)
    noted(path, EXCLUDE)
    reads.clear()
    found = ledger.entries()
    assert found == (incident(), EXCLUDE)
    assert reads == [len(first)], "only what was added is read"
    assert ledger.entries() is found
    assert reads == [len(first)]


def test_an_incident_asked_for_again_is_noted_once(ledger: Ledger, path: Path) -> None:
    whole = noted(path, incident(), incident())
    ledger.note(incident())
    ledger.note(incident())
    assert path.read_bytes() == whole
    assert ledger.entries() == (incident(),)


@pytest.mark.parametrize(
    "other", [incident(2), incident(node="n3"), incident(run="other"), incident(at=7.0)]
)
def test_another_incident_is_noted_also_of_a_run_that_started_afresh(
    path: Path, other: NodeIncident
) -> None:
    noted(path, incident(), other)
    assert Ledger(path).entries() == (incident(), other)


def test_a_person_may_say_the_same_again(path: Path) -> None:
    include = NodeIncluded(at=7.0, node="n2", by="ada")
    entries = (EXCLUDE, include, EXCLUDE, include)
    noted(path, *entries)
    assert Ledger(path).entries() == entries


def test_a_long_cause_is_cut_and_still_noted_once(path: Path) -> None:
    long = NodeIncident(
        at=5.0, node="n1", run="moe", incident=1, fault="gpu", cause="\u00e9" * 9999
    )
    whole = noted(path, long, long)
    assert len(whole) < 4096
    (found,) = Ledger(path).entries()
    assert isinstance(found, NodeIncident)
    assert found.cause == "\u00e9" * TEXT_MAX


def test_a_line_torn_at_any_byte_costs_at_most_itself(path: Path) -> None:
    whole = noted(path, EXCLUDE, incident())
    start = len(seal(encode(EXCLUDE)))
    for cut in range(start + 1, len(whole)):
        path.write_bytes(whole[:cut])
        reader = Ledger(path)
        assert reader.entries() == (EXCLUDE,)
        assert reader.skipped == 0, "it may still be on its way"
        Ledger(path).note(incident(2))
        kept = (incident(),) if cut == len(whole) - 1 else ()  # only its newline was missing
        assert reader.entries() == (EXCLUDE, *kept, incident(2))
        assert reader.skipped == 1 - len(kept)
        assert path.read_bytes().startswith(whole[:cut] + b"\n"), "nothing is rewritten"


def test_the_line_that_was_torn_is_noted_again(ledger: Ledger, path: Path) -> None:
    whole = noted(path, incident())
    path.write_bytes(whole[:-9])
    ledger.note(incident())
    assert ledger.entries() == (incident(),)
    path.write_bytes(whole[:-1])
    ledger.note(incident())
    assert path.read_bytes() == whole, "all of it was there but the newline"


@pytest.mark.parametrize(
    "damage",
    [
        b"\n",
        b"\0" * 50 + b"\n",
        b"<<<<<<< HEAD\n",
        b"\xff\xfe\n",
        seal(encode(EXCLUDE)).replace(b"fan", b"pan"),
        seal({"is": "NodeRepaired", "at": 1.0, "node": "n1"}),
        seal({**encode(EXCLUDE), "ticket": "later version"}),
        seal({"is": "NodeExcluded", "at": "soon", "node": "n2", "by": "ada", "why": ""}),
    ],
)
def test_a_line_that_cannot_be_read_is_skipped_counted_and_kept(path: Path, damage: bytes) -> None:
    whole = noted(path, incident())
    path.write_bytes(whole + damage)
    noted(path, EXCLUDE)
    ledger = Ledger(path)
    assert ledger.entries() == (incident(), EXCLUDE)
    assert ledger.skipped == 1
    assert path.read_bytes() == whole + damage + seal(encode(EXCLUDE))


def test_a_file_that_was_replaced_cut_or_removed_is_read_from_its_start(
    ledger: Ledger, path: Path
) -> None:
    noted(path, incident(), EXCLUDE)
    assert len(ledger.entries()) == 2
    other = path.with_name("other")
    other.write_bytes(seal(encode(incident(9))))
    other.replace(path)
    assert ledger.entries() == (incident(9),)
    path.write_bytes(b"")
    assert ledger.entries() == ()
    noted(path, EXCLUDE)
    assert ledger.entries() == (EXCLUDE,)
    path.unlink()
    assert ledger.entries() == ()


def test_a_full_disk_is_one_line_and_harms_nothing_that_was_there(
    ledger: Ledger, path: Path
) -> None:
    whole = noted(path, EXCLUDE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, before[1]))
    try:
        with pytest.raises(LedgerUnavailable, match=r"node-ledger\.jsonl: cannot be written: File"):
            ledger.note(incident())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert ledger.entries() == (EXCLUDE,)
    ledger.note(incident())
    assert Ledger(path).entries() == ledger.entries() == (EXCLUDE, incident())


def test_what_cannot_be_opened_is_unknown_and_not_empty(ledger: Ledger, path: Path) -> None:
    path.mkdir()
    for verb in (ledger.entries, lambda: ledger.note(EXCLUDE)):
        with pytest.raises(LedgerUnavailable, match=r"node-ledger\.jsonl: cannot be .*: Is a dir"):
            verb()
    assert LedgerUnavailable.exit_code is ExitCode.PRECONDITION


def test_a_directory_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "nowhere" / FILE_NAME)
    assert ledger.entries() == ()
    with pytest.raises(LedgerUnavailable, match="No such file"):
        ledger.note(EXCLUDE)


def test_a_frozen_holder_of_the_lock_is_not_waited_for_without_end(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    whole = noted(path, EXCLUDE)
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert ledger.entries() == (EXCLUDE,), "reading needs no lock"
        with pytest.raises(LedgerUnavailable, match=r"locked by another process for 0\.1 s"):
            ledger.note(incident())
    assert path.read_bytes() == whole
    ledger.note(incident())
    assert ledger.entries() == (EXCLUDE, incident())


def test_a_file_system_without_locks_is_written_all_the_same(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(module.errno.ENOLCK, os.strerror(module.errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    ledger.note(incident())
    ledger.note(incident())
    assert ledger.entries() == (incident(),)
