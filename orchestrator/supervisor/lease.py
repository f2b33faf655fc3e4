"""One writer per run: a lease with a rising epoch.

The lease is a folder with one file per epoch. Creating the next number is the claim: exclusive
creation by hard link is atomic on local and network file systems alike, so of two supervisors
exactly one gets it. The holder renews by rewriting its file. A claim is allowed when the newest
holder is dead (same machine: its process is gone; an earlier start of the claimant's own Slurm
job), has released the lease, or has not renewed for the length of a lease as watched by the
claimant's own clock, never by comparing clocks of hosts.

A network file system may show a folder as it was up to a minute ago, but not to somebody who has
just written into it. So a holder that could be deposed, because it has not renewed for as long as
others may have waited, writes its renewal before it looks whether there is a later epoch.
"""

import contextlib
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import AlreadyRunning, LeaseLost
from orchestrator.process_id import ProcessId, start_time

LEASE_S = 10.0
POLL_S = 0.2
UNSURE_S = LEASE_S / 2  # without a renewal for so long, what the folder shows may be old


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds an epoch.

    Attributes:
        place: The boot and the PID namespace in which `pid` means this process.
        job: The Slurm job that it is in, "" for none.
        start: Which start of that job it is in.
        renewal: Counts up while it lives.
    """

    epoch: int
    host: str = "?"
    place: str = ""
    job: str = ""
    start: int = 0
    pid: int = 0
    started: int = 0
    renewal: int = 0
    released: bool = False

    @property
    def is_dead(self) -> bool:
        """Whether it is known to be gone; False for other machines, where nobody can tell."""
        job, start = _job()
        # Slurm has given up the node of that start, which may be cut off and not know it. Should it
        # still live, it is deposed.
        was_ours = self.job != "" and self.job == job and self.start < start
        if self.released or was_ours:
            return True
        is_here = self.place == _place()
        return is_here and not ProcessId(pid=self.pid, started=self.started).is_alive

    @property
    def where(self) -> str:
        """Where it is, for people."""
        return f"{self.host}, pid {self.pid}" if self.pid else "unknown"


Said = Callable[[Holder], None]


class Lease:
    """A held lease."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self._folder = folder
        self.epoch = epoch
        self._renewal = 0
        self._renewed = _clock()

    @classmethod
    def take(cls, folder: Path, behind: int = 0) -> "Lease":
        """Take the next epoch, waiting at most one lease for a holder on another host.

        Args:
            folder: Where the epochs are.
            behind: The newest epoch of the journal, read before this. Should the folder have been
                removed, numbers go on behind it: records of an earlier epoch would not count.

        Raises:
            AlreadyRunning: A living supervisor holds the run, or another was faster.
        """
        folder.mkdir(parents=True, exist_ok=True)
        newest = _newest(folder)
        if newest is not None and not newest.is_dead:
            _outwait(folder, newest)
        lease = cls._claim(folder, max(newest.epoch if newest else 0, behind) + 1)
        if lease is None:
            raise AlreadyRunning(f"another supervisor just took {folder.parent.name}")
        return lease

    @classmethod
    def wait(cls, folder: Path, said: Said, behind: int = 0) -> "Lease":
        """Take the next epoch as soon as nobody holds the newest, however long that takes.

        Args:
            folder: As for `take`.
            said: Gets each holder that is waited for, once.
            behind: As for `take`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        vigil, told = _Vigil(), 0
        while True:
            try:
                is_free = vigil.look(folder)
            except OSError:  # nothing is known now: the wait begins anew
                vigil, is_free = _Vigil(), False
            newest = vigil.newest
            if is_free:
                lease = cls._claim(folder, max(newest.epoch if newest else 0, behind) + 1)
                if lease is not None:
                    return lease
            elif newest is not None and newest.epoch != told:
                told = newest.epoch
                said(newest)
            time.sleep(POLL_S)

    @classmethod
    def _claim(cls, folder: Path, epoch: int) -> "Lease | None":
        """Create an epoch; None when somebody else has."""
        lease = cls(folder, epoch)
        temporary = folder / f".claim-{uuid.uuid4().hex}"
        temporary.write_text(lease._render(), encoding="utf-8")
        try:
            os.link(temporary, folder / _name(epoch))
        except FileExistsError:
            # An answer that got lost was given again: the second time the file is there, and ours.
            return lease if temporary.stat().st_nlink > 1 else None
        finally:
            temporary.unlink()
        return lease

    @property
    def holder(self) -> str:
        """Where the holder is, for people."""
        return f"{socket.gethostname()}:{os.getpid()}"

    def renew(self) -> None:
        """Show that the holder lives, and check that it still holds.

        Raises:
            LeaseLost: A later epoch exists.
        """
        self._look()
        self._renewal += 1
        now = _clock()
        self._write(self._render())
        self._look()
        self._renewed = now

    def check(self) -> None:
        """Raise LeaseLost when a later epoch exists."""
        if _clock() - self._renewed > UNSURE_S:
            self.renew()
        self._look()

    def _look(self) -> None:
        if (self._folder / _name(self.epoch + 1)).exists():
            raise LeaseLost(f"epoch {self.epoch} is over: another supervisor has taken over")

    def release(self) -> None:
        """Let the next supervisor in at once; one that is deposed writes nothing more."""
        with contextlib.suppress(OSError, LeaseLost):
            self._look()
            self._write(self._render(released=True))

    def _render(self, *, released: bool = False) -> str:
        return json.dumps(
            {
                "host": socket.gethostname(),
                "place": _place(),
                "job": _job()[0],
                "start": _job()[1],
                "pid": os.getpid(),
                "started": start_time(os.getpid()) or 0,
                "renewal": self._renewal,
                "released": released,
            }
        )

    def _write(self, text: str) -> None:
        temporary = self._folder / f".renew-{self.epoch}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._folder / _name(self.epoch))


def current_holder(folder: Path) -> Holder | None:
    """Return who holds or last held the lease, None when nobody ever did."""
    return _newest(folder) if folder.is_dir() else None


def _outwait(folder: Path, holder: Holder) -> None:
    message = (
        f"run {folder.parent.name} is already supervised ({holder.where}); "
        "stop that one first, or wait for it with --standby"
    )
    if holder.place == _place():
        raise AlreadyRunning(message)
    end = _clock() + LEASE_S
    while _clock() < end:
        time.sleep(POLL_S)
        newest = _newest(folder)
        if newest is not None and newest.epoch == holder.epoch and newest.is_dead:
            return
        if newest != holder:
            raise AlreadyRunning(message)


class _Vigil:
    """A claimant's watch over the holder of the newest epoch."""

    def __init__(self) -> None:
        self.newest: Holder | None = None
        self._since = self._looked = -math.inf

    def look(self, folder: Path) -> bool:
        """Return whether nobody holds the newest epoch (any more); raises OSError."""
        newest, now = _newest(folder), _clock()
        # A look that took long, or came late, proves nothing about the time in between.
        if newest != self.newest or now - self._looked > UNSURE_S:
            self.newest, self._since = newest, now
        self._looked = now
        return newest is None or newest.is_dead or now - self._since >= LEASE_S


def _clock() -> float:
    """Return seconds that also pass while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _place() -> str:
    """Name this boot and this PID namespace: host names repeat, in containers and elsewhere."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _job() -> tuple[str, int]:
    """Return the Slurm job of this process, "" for none, and which start of it this is."""
    job = os.environ.get("SLURM_JOB_ID", "")
    cluster, start = (
        os.environ.get(f"SLURM_{key}", "") for key in ("CLUSTER_NAME", "RESTART_COUNT")
    )
    return (f"{cluster}/{job}" if job else ""), int(start) if start.isdigit() else 0


def _name(epoch: int) -> str:
    return f"epoch-{epoch:08d}.json"


def _newest(folder: Path) -> Holder | None:
    # Not glob: an error would read as an empty folder.
    names = sorted(path.name for path in folder.iterdir() if path.name.startswith("epoch-"))
    if not names:
        return None
    epoch = int(names[-1][6:14])
    try:
        value: dict[str, Any] = json.loads((folder / names[-1]).read_text(encoding="utf-8"))
        return Holder(epoch=epoch, **value)
    except (ValueError, TypeError):
        # Emptied by a power failure: whether its writer lives can only be told by waiting.
        return Holder(epoch=epoch, host="?", place="?", pid=0, started=0, renewal=0, released=False)
