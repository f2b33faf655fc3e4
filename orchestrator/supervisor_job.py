"""What runs in the job that `everstep submit` makes: a supervisor, and another when it crashes.

The job's folder is `RUN_DIR/supervisor`; the run file as it was at submission is frozen in it.
Slurm starts the job again when its node dies, and when it asks for that itself shortly before its
time limit. The ranks notice none of this.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from orchestrator.app import outcome_of
from orchestrator.core.actions import Outcome
from orchestrator.errors import EverstepError
from orchestrator.exit_codes import FINAL, OUTCOME_CODE, ExitCode
from orchestrator.launch.slurm_commands import SlurmError
from orchestrator.launch.slurm_supervisor import FROZEN, LOG, requeue

log = logging.getLogger(__name__)

REQUEUE_EVERY_S = 10.0
POLL_S = 0.2
AGAIN_S = (1.0, 5.0, 15.0, 60.0)
STEADY_S = 300.0


def keep_supervising(folder: str) -> NoReturn:
    """Supervise until the run is over or the job ends; exits with the code of `everstep run`.

    Args:
        folder: The job's folder.
    """
    home = Path(folder)
    _write_to(home.parent / LOG)
    job, again = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    log.info("job %s on %s, start %d", job, os.environ["SLURMD_NODENAME"], int(again) + 1)
    keeper = Keeper(home, job)
    # submitit's wrapper, which called this, has handlers of its own for all three.
    signal.signal(signal.SIGTERM, keeper.end)
    signal.signal(signal.SIGUSR2, keeper.time_is_up)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    sys.exit(keeper.run(is_first=again == "0"))


class Keeper:
    """Keeps one supervisor running.

    Args:
        home: The job's folder.
        job: The job's id.
    """

    def __init__(self, home: Path, job: str) -> None:
        self._home = home
        self._job = job
        self._child: subprocess.Popen[bytes] | None = None
        self._ended = False  # no Event: its lock is not for signal handlers

    def run(self, *, is_first: bool) -> int:
        """Start supervisors until one has nothing more to do; returns its exit code."""
        tries = 0
        while not self._ended:
            # A run that ended just before the last supervisor did must not begin anew.
            if not is_first and (outcome := self._outcome()) is not None:
                return int(OUTCOME_CODE[outcome.value])
            began, code = time.monotonic(), self._supervise()
            if code in FINAL or not self._has_records:  # nothing lives that needs a supervisor
                return code if code >= 0 else 128 - code
            is_first = False
            tries = 1 if time.monotonic() - began > STEADY_S else tries + 1
            wait_s = AGAIN_S[min(tries, len(AGAIN_S)) - 1]
            if not self._ended:
                log.error("the supervisor ended with %d; the next in %g s", code, wait_s)
            self._sleep(wait_s)
        return int(ExitCode.INTERRUPTED)

    def _outcome(self) -> Outcome | None:
        with contextlib.suppress(EverstepError):  # a supervisor will say so
            return outcome_of(self._home.parent)
        return None

    @property
    def _has_records(self) -> bool:
        path = self._home.parent / "journal.jsonl"
        return path.exists() and path.stat().st_size > 0

    def _sleep(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        while not self._ended and time.monotonic() < until:
            time.sleep(POLL_S)

    def _supervise(self) -> int:
        command = [sys.executable, "-P", "-m", __name__, str(self._home / FROZEN)]
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        if self._ended:  # the signal came before there was anybody to pass it on to
            self._child.terminate()
        return self._child.wait()

    def end(self, *_: object) -> None:
        """On SIGTERM: end the supervisor, and leave the ranks alone."""
        self._ended = True
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()

    def time_is_up(self, *_: object) -> None:
        """On SIGUSR2: have Slurm start the job again; its SIGTERM ends this start of it.

        Until then the run is supervised.
        """
        threading.Thread(target=self._requeue, daemon=True).start()

    def _requeue(self) -> None:
        while not self._ended:
            try:
                requeue(self._job)
            except SlurmError as error:
                log.error("job %s cannot be started again yet: %s", self._job, error)
            else:
                log.info("the time limit is near: Slurm starts job %s again", self._job)
                return
            self._sleep(REQUEUE_EVERY_S)


def _write_to(path: Path) -> None:
    """Send all output to the run's own file, after that of earlier starts."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=form, force=True)


def main() -> None:
    """Be one supervisor: `everstep run FROZEN --standby --plain`."""
    # Slurm sends its warning to all processes of the job; those below inherit that it is ignored.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    from orchestrator import cli

    sys.argv = ["everstep", "run", *sys.argv[1:], "--standby", "--plain"]
    cli.main()


if __name__ == "__main__":
    main()
