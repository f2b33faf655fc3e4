import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.errors import AlreadyRunning, LeaseLost
from orchestrator.process_id import start_time
from orchestrator.supervisor import lease as leases
from orchestrator.supervisor.lease import Lease, current_holder

ELSEWHERE = "another-host"


def write(folder: Path, epoch: int, **changes: object) -> Path:
    """Write what a holder of an epoch would have written."""
    folder.mkdir(exist_ok=True, parents=True)
    value = {"host": ELSEWHERE, "place": "there", "pid": 1, "started": 1}
    value |= {"job": "", "start": 0, "renewal": 0, "released": False}
    path = folder / f"epoch-{epoch:08d}.json"
    path.write_text(json.dumps({**value, **changes}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "big" / "lease"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a lease short, and the waiting for one instant."""
    monkeypatch.setattr(leases, "LEASE_S", 0.2)
    monkeypatch.setattr(leases, "POLL_S", 0.01)


def test_the_first_claim_is_epoch_one(folder: Path) -> None:
    lease = Lease.take(folder)
    assert lease.epoch == 1
    holder = current_holder(folder)
    assert holder is not None
    assert holder.pid == os.getpid()
    assert not holder.is_dead
    assert str(os.getpid()) in lease.holder


def test_nobody_ever_held_what_does_not_exist(folder: Path) -> None:
    assert current_holder(folder) is None


def test_a_living_holder_on_this_host_keeps_it(folder: Path) -> None:
    lease = Lease.take(folder)
    with pytest.raises(AlreadyRunning, match=rf"big is already supervised.*{os.getpid()}"):
        Lease.take(folder)
    lease.renew()
    assert [path.name for path in folder.iterdir()] == ["epoch-00000001.json"]


def test_a_released_lease_is_taken_at_once_and_the_epoch_rises(folder: Path) -> None:
    Lease.take(folder).release()
    assert Lease.take(folder).epoch == 2


def test_a_lease_whose_folder_was_removed_goes_on_behind_the_journal(folder: Path) -> None:
    assert Lease.take(folder, 3).epoch == 4
    assert Lease.take(folder.parent / "other", 0).epoch == 1
    write(folder, 7, released=True)
    assert Lease.wait(folder, lambda _: None, 5).epoch == 8


def test_a_dead_holder_on_this_host_is_followed_at_once(folder: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from orchestrator.supervisor.lease import Lease;"
        "Lease.take(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=False, timeout=60)
    holder = current_holder(folder)
    assert holder is not None
    assert holder.is_dead
    assert Lease.take(folder).epoch == 2


def test_a_later_process_with_the_holders_pid_is_not_the_holder(folder: Path) -> None:
    write(folder, 1, place=leases._place(), pid=os.getpid(), started=1)
    assert Lease.take(folder).epoch == 2


@pytest.mark.usefixtures("short")
def test_a_machine_of_the_same_name_is_not_this_one(folder: Path) -> None:
    """Containers repeat host names: a pid that is unknown here may live there."""
    write(folder, 1, host=socket.gethostname(), pid=2**22 + 1)
    holder = current_holder(folder)
    assert holder is not None
    assert not holder.is_dead
    assert Lease.take(folder).epoch == 2, "after it was silent for the length of a lease"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"host": "a"'])
def test_a_lease_that_a_power_failure_emptied_is_waited_for_and_followed(
    folder: Path, short: None, text: str
) -> None:
    path = write(folder, 4)
    path.write_text(text)
    lease = Lease.take(folder)
    assert lease.epoch == 5
    holder = current_holder(folder)
    assert holder is not None
    assert holder.pid == os.getpid()


def test_of_two_claimants_exactly_one_gets_it(folder: Path) -> None:
    """Whoever reads the same newest epoch claims the same next one."""
    write(folder, 4, released=True)
    got: list[int] = []
    refused: list[AlreadyRunning] = []
    gate = threading.Barrier(8)

    def claim() -> None:
        gate.wait()
        try:
            got.append(Lease.take(folder).epoch)
        except AlreadyRunning as error:
            refused.append(error)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [5]
    assert len(refused) == 7
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".claim")]


@pytest.mark.usefixtures("short")
def test_a_claimant_on_another_host_waits_and_follows_a_silent_holder(folder: Path) -> None:
    write(folder, 1)
    assert Lease.take(folder).epoch == 2


@pytest.mark.usefixtures("short")
def test_a_claimant_on_another_host_yields_to_a_holder_that_renews(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1)

    def renews(_: float) -> None:
        write(folder, 1, renewal=1)

    monkeypatch.setattr(leases.time, "sleep", renews)
    with pytest.raises(AlreadyRunning, match=r"already supervised \(another-host, pid 1\)"):
        Lease.take(folder)
    assert current_holder(folder) is not None
    assert len(list(folder.iterdir())) == 1


@pytest.mark.usefixtures("short")
def test_a_claimant_that_waited_yields_to_one_that_was_faster(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1)
    monkeypatch.setattr(leases.time, "sleep", lambda _: write(folder, 2))
    with pytest.raises(AlreadyRunning):
        Lease.take(folder)


@pytest.mark.usefixtures("short")
def test_a_claimant_that_waited_follows_a_holder_that_leaves_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1)
    monkeypatch.setattr(leases.time, "sleep", lambda _: write(folder, 1, released=True))
    assert Lease.take(folder).epoch == 2


def test_a_deposed_holder_finds_out_and_writes_nothing_more(folder: Path) -> None:
    lease = Lease.take(folder)
    lease.check()
    later = write(folder, 2)
    before = {path.name: path.read_text() for path in folder.iterdir()}
    for call in (lease.check, lease.renew):
        with pytest.raises(LeaseLost, match="epoch 1 is over"):
            call()
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    assert later.exists()


def test_a_holder_deposed_twice_over_finds_out_too(folder: Path) -> None:
    lease = Lease.take(folder)
    write(folder, 2)
    write(folder, 3)
    with pytest.raises(LeaseLost):
        lease.renew()


def test_a_deposed_holder_does_not_even_release(folder: Path) -> None:
    lease = Lease.take(folder)
    write(folder, 2)
    before = {path.name: path.read_text() for path in folder.iterdir()}
    lease.release()
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_a_holder_that_was_frozen_renews_before_it_believes_what_it_sees(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system shows what it knew until somebody writes."""
    lease = Lease.take(folder)
    lease.check()
    holder = current_holder(folder)
    assert holder is not None
    assert holder.renewal == 0
    later = leases._clock() + 60.0
    monkeypatch.setattr(leases, "_clock", lambda: later)
    lease.check()
    holder = current_holder(folder)
    assert holder is not None
    assert holder.renewal == 1


def waiting(folder: Path, then: Callable[[], object]) -> tuple[Lease, list[str]]:
    """Wait for a lease, and let something happen when the holder has been named."""
    told: list[str] = []

    def said(holder: leases.Holder) -> None:
        told.append(f"{holder.epoch}: {holder.where}")
        then()

    return Lease.wait(folder, said), told


def test_who_waits_gets_a_lease_that_nobody_holds_at_once(folder: Path) -> None:
    lease, told = waiting(folder, lambda: None)
    assert (lease.epoch, told) == (1, [])


@pytest.mark.usefixtures("short")
def test_who_waits_takes_over_from_a_holder_that_leaves(folder: Path) -> None:
    write(folder, 1)
    lease, told = waiting(folder, lambda: write(folder, 1, released=True))
    assert (lease.epoch, told) == (2, ["1: another-host, pid 1"])


@pytest.mark.usefixtures("short")
def test_who_waits_takes_over_from_a_holder_that_fell_silent(folder: Path) -> None:
    write(folder, 1)
    assert waiting(folder, lambda: None)[0].epoch == 2


@pytest.mark.usefixtures("short")
def test_who_waits_does_so_for_as_long_as_the_holder_renews(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1)
    real, looks = leases._newest, itertools.count()

    def renews(place: Path) -> leases.Holder | None:
        write(folder, 1, renewal=min(next(looks), 40))
        return real(place)

    monkeypatch.setattr(leases, "_newest", renews)
    lease, told = waiting(folder, lambda: None)
    assert lease.epoch == 2
    assert len(told) == 1
    assert next(looks) > 40


@pytest.mark.usefixtures("short")
def test_who_waits_goes_on_when_another_was_faster(folder: Path) -> None:
    write(folder, 1)
    told: list[int] = []

    def said(holder: leases.Holder) -> None:
        told.append(holder.epoch)
        if holder.epoch == 1:
            write(folder, 2)

    assert Lease.wait(folder, said).epoch == 3
    assert told == [1, 2]


@pytest.mark.usefixtures("short")
def test_who_waits_and_was_frozen_itself_looks_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder may have renewed a moment before the look that comes after the freeze."""
    write(folder, 1)
    vigil = leases._Vigil()
    assert not vigil.look(folder)
    monkeypatch.setattr(leases, "UNSURE_S", 0.05)
    time.sleep(0.3)
    assert not vigil.look(folder)


@pytest.mark.usefixtures("short")
def test_who_waits_outlives_a_file_system_that_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1)
    real, looks = leases._newest, itertools.count()

    def fails(place: Path) -> leases.Holder | None:
        if next(looks) in (1, 2):
            raise OSError(116, "Stale file handle")
        return real(place)

    monkeypatch.setattr(leases, "_newest", fails)
    assert Lease.wait(folder, lambda _: None).epoch == 2
    assert next(looks) > 4


def test_of_many_who_wait_each_gets_an_epoch_of_its_own(folder: Path) -> None:
    write(folder, 4, released=True)
    got: list[int] = []
    gate = threading.Barrier(4)

    def claim() -> None:
        gate.wait()
        lease = Lease.wait(folder, lambda _: None)
        got.append(lease.epoch)
        lease.release()

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [5, 6, 7, 8]


def test_an_earlier_start_of_the_same_job_is_followed_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm started the job again elsewhere: the earlier node may be cut off, and renew."""
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    Lease.take(folder)
    holder = current_holder(folder)
    assert holder is not None
    assert (holder.job, holder.start) == ("c/7", 0)
    assert not holder.is_dead
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert Lease.take(folder).epoch == 2
    with pytest.raises(AlreadyRunning):
        Lease.take(folder)


@pytest.mark.parametrize(("job", "start"), [("c/8", 0), ("d/7", 0), ("c/7", 2), ("c/7", 1)])
def test_another_job_and_a_later_start_are_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, job: str, start: int
) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write(folder, 1, job=job, start=start)
    holder = current_holder(folder)
    assert holder is not None
    assert not holder.is_dead


def test_renewals_count_up(folder: Path) -> None:
    lease = Lease.take(folder)
    lease.renew()
    lease.renew()
    holder = current_holder(folder)
    assert holder is not None
    assert holder.renewal == 2


def test_a_release_on_a_full_disk_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease.take(folder)

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    lease.release()


def test_a_process_that_is_gone_has_no_start_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert start_time(child.pid) is None
    assert start_time(os.getpid()) == start_time(os.getpid())


def test_a_zombie_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(child.pid) is None
    child.wait()
