"""One writer per run: a lease with a rising epoch.

The lease is a folder with one file per epoch. Creating the next number is the claim: exclusive
creation by hard link is atomic on local and network file systems alike, so of two supervisors
exactly one gets it. The holder renews by rewriting its file. A claim is allowed when the newest
holder is dead (same host: its process is gone), has released the lease, or has not renewed for
the length of a lease as watched by the claimant's own clock, never by comparing clocks of hosts.
"""

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import AlreadyRunning, LeaseLost
from orchestrator.process_id import ProcessId, start_time

LEASE_S = 10.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds an epoch."""

    epoch: int
    host: str
    pid: int
    started: int
    renewal: int
    released: bool

    @property
    def is_dead(self) -> bool:
        """Whether it is known to be gone; False for other hosts, where nobody can tell."""
        if self.released:
            return True
        here = self.host == socket.gethostname()
        return here and not ProcessId(pid=self.pid, started=self.started).is_alive


class Lease:
    """A held lease."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self._folder = folder
        self.epoch = epoch
        self._renewal = 0

    @classmethod
    def take(cls, folder: Path) -> "Lease":
        """Take the next epoch, waiting at most one lease for a holder on another host.

        Raises:
            AlreadyRunning: A living supervisor holds the run, or another was faster.
        """
        folder.mkdir(parents=True, exist_ok=True)
        newest = _newest(folder)
        if newest is not None and not newest.is_dead:
            _outwait(folder, newest)
        epoch = newest.epoch + 1 if newest else 1
        lease = cls(folder, epoch)
        temporary = folder / f".claim-{uuid.uuid4().hex}"
        temporary.write_text(lease._render(), encoding="utf-8")
        try:
            os.link(temporary, folder / _name(epoch))
        except FileExistsError as error:
            raise AlreadyRunning(f"another supervisor just took {folder.parent.name}") from error
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
        self.check()
        self._renewal += 1
        self._write(self._render())

    def check(self) -> None:
        """Raise LeaseLost when a later epoch exists."""
        if (self._folder / _name(self.epoch + 1)).exists():
            raise LeaseLost(f"epoch {self.epoch} is over: another supervisor has taken over")

    def release(self) -> None:
        """Let the next supervisor in at once."""
        with contextlib.suppress(OSError):
            self._write(self._render(released=True))

    def _render(self, *, released: bool = False) -> str:
        return json.dumps(
            {
                "host": socket.gethostname(),
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
    where = f"{holder.host}, pid {holder.pid}"
    message = f"run {folder.parent.name} is already supervised ({where}); stop that one first"
    if holder.host == socket.gethostname():
        raise AlreadyRunning(message)
    end = time.monotonic() + LEASE_S
    while time.monotonic() < end:
        time.sleep(POLL_S)
        newest = _newest(folder)
        if newest is not None and newest.epoch == holder.epoch and newest.is_dead:
            return
        if newest != holder:
            raise AlreadyRunning(message)


def _name(epoch: int) -> str:
    return f"epoch-{epoch:08d}.json"


def _newest(folder: Path) -> Holder | None:
    names = sorted(path.name for path in folder.glob("epoch-*.json"))
    if not names:
        return None
    epoch = int(names[-1][6:14])
    try:
        value: dict[str, Any] = json.loads((folder / names[-1]).read_text(encoding="utf-8"))
        return Holder(epoch=epoch, **value)
    except (ValueError, TypeError):
        # Emptied by a power failure: whether its writer lives can only be told by waiting.
        return Holder(epoch=epoch, host="?", pid=0, started=0, renewal=0, released=False)
