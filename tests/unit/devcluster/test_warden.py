"""The warden with real processes; it needs no root."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.devcluster.errors import DevclusterError
from deploy.devcluster.processes import children, is_alive, kill, wait_until
from deploy.devcluster.units import Units

PATIENCE_S = 20.0


@pytest.fixture
def units() -> Iterator[Units]:
    # Not pytest's folder: a socket's path may have 107 letters at most.
    with tempfile.TemporaryDirectory(prefix="dc-", ignore_cleanup_errors=True) as folder:
        opened = Units(Path(folder))
        opened.open()
        yield opened
        opened.close()


def test_a_unit_runs_until_it_is_stopped(units: Units) -> None:
    units.start("a", ["sleep", "1000"])
    pid = units.pid("a")
    assert pid is not None
    assert is_alive(pid)
    units.stop("a")
    assert not is_alive(pid)
    assert units.all()["a"].exit == -signal.SIGTERM


def test_a_unit_that_is_stopped_as_it_starts_gets_the_signal(units: Units) -> None:
    for number in range(20):
        units.start(f"u{number}", ["sleep", "1000"])
        units.stop(f"u{number}")
        assert units.all()[f"u{number}"].exit == -signal.SIGTERM


def test_starting_twice_leaves_the_first_alone(units: Units) -> None:
    units.start("a", ["sleep", "1000"])
    pid = units.pid("a")
    units.start("a", ["sleep", "1000"])
    assert units.pid("a") == pid


def test_a_unit_that_ended_tells_its_code_and_may_start_again(units: Units) -> None:
    units.start("a", ["false"])
    wait_until("it ends", lambda: units.pid("a") is None, PATIENCE_S)
    assert units.all()["a"].exit == 1
    units.start("a", ["sleep", "1000"])
    assert units.pid("a") is not None


def test_a_unit_that_ends_instead_of_getting_ready_is_told_with_its_last_line(
    units: Units,
) -> None:
    units.start("a", ["sh", "-c", "echo first; echo no such key >&2; exit 4"])
    with pytest.raises(DevclusterError, match=r"a ended: no such key; see .*a\.out"):
        units.wait_ready("a", lambda: False, PATIENCE_S)


def test_orphans_come_to_the_warden_and_are_reaped(units: Units) -> None:
    units.start("a", ["sh", "-c", "sleep 1000 & echo $!; exit 0"])
    wait_until("the parent ends", lambda: units.pid("a") is None, PATIENCE_S)
    warden = units.warden_pid()
    assert warden is not None
    (orphan,) = children(warden)
    kill(orphan)
    wait_until("it is reaped", lambda: not Path(f"/proc/{orphan}").exists(), PATIENCE_S)


def test_closing_ends_units_and_their_orphans(units: Units) -> None:
    units.start("a", ["sh", "-c", "trap '' TERM; sleep 1000 & setsid sleep 1000 & wait"])
    pid, warden = units.pid("a"), units.warden_pid()
    assert pid is not None
    assert warden is not None
    wait_until("its children run", lambda: len(children(pid)) == 2, PATIENCE_S)
    all_of_it = (warden, pid, *children(pid))
    units.close()
    assert not any(is_alive(each) for each in all_of_it)


def test_when_the_warden_is_killed_its_units_die_with_it(units: Units) -> None:
    units.start("a", ["sleep", "1000"])
    pid, warden = units.pid("a"), units.warden_pid()
    assert pid is not None
    assert warden is not None
    kill(warden)
    wait_until("it dies", lambda: not is_alive(pid), PATIENCE_S)
    assert units.all() == {}


def test_a_wrong_request_is_answered_and_harms_nothing(units: Units) -> None:
    with pytest.raises(DevclusterError, match="unknown request"):
        units._ask({"do": "dance"})
    with pytest.raises(DevclusterError, match="KeyError"):
        units._ask({"do": "start"})
    assert units.warden_pid() is not None


def test_the_environment_of_units_is_short_and_marked(units: Units) -> None:
    units.start("a", ["sleep", "1000"])
    pid = units.pid("a")
    wait_until("it is sleep", lambda: b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes(), 20)
    names = {
        line.split(b"=")[0].decode()
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if line
    }
    assert names == {"PATH", "LANG", "HOME", "DEVCLUSTER_STATE", "SLURM_CONF"}
    assert os.environ.get("DEVCLUSTER_STATE") is None
