"""Nodes from Slurm: one allocation of the world and its spares, one agent on each node.

Slurm says whether the allocation waits, runs or is gone, and which of its nodes are lost. It
cannot tell whether an agent lives; heartbeats do.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import tenacity

from monitors.observations import Observation
from orchestrator.launch.folders import folder_of, home, note_of
from orchestrator.launch.launcher import (
    Allocation,
    AllocationSpec,
    LaunchRefusedError,
    LaunchUnknownError,
)
from orchestrator.launch.slurm_child import submit_in_child
from orchestrator.launch.slurm_commands import (
    SlurmError,
    SlurmRefused,
    SlurmUnavailable,
    cancel_jobs,
    job_record,
    jobs_by_id,
    jobs_of_user,
    known_to_slurm,
    release_job,
)
from orchestrator.launch.slurm_ending import scontrol_excluded
from orchestrator.launch.slurm_look import LOOK_EVERY_S, SlurmLook, is_held, manned_by
from orchestrator.launch.slurm_options import SlurmOptions
from orchestrator.launch.slurm_submit import request_of
from orchestrator.launch.slurm_text import JobFate, JobView

log = logging.getLogger(__name__)

SUBMIT_TRIES = 3
SUBMIT_RETRY_S, SUBMIT_RETRY_LONGEST_S = 2.0, 15.0
LEAVING_S = 2.0
GOODBYE_S = 10.0
CANCEL_TIMEOUT_S = 15.0
CANCEL_EVERY_S = 0.3


class SlurmLauncher:
    """Launcher for a Slurm cluster.

    Args:
        run_dir: On a file system that all nodes see; the files of the allocations lie in folders
            of `run_dir/submitit`.
        options: What the site wants of the allocation.
        look_every_s: Slurm is asked at most this often, and less often while it fails: all of a
            site's users share one controller.
    """

    def __init__(
        self, run_dir: Path, options: SlurmOptions, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._run_dir = run_dir.absolute()
        self._options = options
        self._look = SlurmLook(self._run_dir, options.reservation, look_every_s)

    def submit(self, spec: AllocationSpec) -> str:
        """Queue the allocation, or find it; see `Launcher.submit`.

        The child may be killed, and Slurm may take a job and not say so: asking again is safe.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(SlurmUnavailable),
            stop=tenacity.stop_after_attempt(SUBMIT_TRIES),
            wait=tenacity.wait_exponential_jitter(
                multiplier=SUBMIT_RETRY_S, max=SUBMIT_RETRY_LONGEST_S
            ),
            reraise=True,
        )
        try:
            return retrying(self._submit_once, spec)
        except SlurmRefused as error:
            raise LaunchRefusedError(str(error)) from error
        except SlurmUnavailable as error:
            raise LaunchUnknownError(f"Slurm does not answer: {error}") from error

    def _submit_once(self, spec: AllocationSpec) -> str:
        request = request_of(spec, self._options)
        folder = folder_of(spec)
        folder.mkdir(parents=True, exist_ok=True)
        log, export = folder / "submit.log", self._options.export
        submit_in_child("orchestrator.launch.submit", request, log, export=export)
        return str(note_of(folder)["job"])

    def observe(self, job: str, *, fresh: bool = False) -> Observation[Allocation]:
        """Ask Slurm, or repeat its last answer while that will do; see `Launcher.observe`."""
        return self._look.of(job, fresh=fresh)

    def unhold(self, job: str, exclude: Sequence[str]) -> None:
        """Let a held job try again, at once; see `Launcher.unhold`."""
        try:
            view = jobs_by_id([job]).get(job)
            if view is None or not is_held(view):
                raise LaunchRefusedError(f"job {job} is not held")
            known, _ = scontrol_excluded(job_record(job))
            release_job(job, tuple(dict.fromkeys((*known, *known_to_slurm(exclude)))))
        except SlurmRefused as error:
            raise LaunchRefusedError(str(error)) from error
        except SlurmError as error:
            raise LaunchUnknownError(f"Slurm does not answer: {error}") from error
        finally:
            self._look.forget()

    def cancel(self, job: str) -> None:
        """Give the allocation back, or all of the run's; see `Launcher.cancel`.

        Agents that were told to leave end their job by themselves: it then counts as completed in
        the site's books, and not as cancelled.
        """
        try:
            left = self._living([job] if job else None)
            if any(view.fate is JobFate.RUNNING for view in left) and self._are_leaving(left):
                left = self._wait_until_gone(left, GOODBYE_S)
            if left:
                cancel_jobs([view.job for view in left])
                left = self._wait_until_gone(left, CANCEL_TIMEOUT_S)
            for view in left:
                log.warning("job %s is still there after scancel", view.job)
        except SlurmError as error:
            which = f"scancel {job}" if job else "squeue --me, then scancel"
            log.error("cannot give back %s (%s); do it by hand: %s", job or "all", error, which)
        finally:
            self._look.forget()

    def _living(self, jobs: Sequence[str] | None) -> list[JobView]:
        """Return those of the jobs that wait or run; without any, look for all of the run's.

        Whoever submitted one of them may have ended before it noted that. A number may belong to
        another job by now; of the run's own folder only the end is compared, since a path may
        lead there by several ways.
        """
        ours = home(self._run_dir)
        if jobs is None:
            found = [view for view in jobs_of_user() if Path(view.workdir).parent == ours]
        else:
            named = jobs_by_id(jobs).values()
            found = [v for v in named if Path(v.workdir).parts[-3:-1] == ours.parts[-2:]]
        return [view for view in found if view.fate is not JobFate.GONE]

    def _are_leaving(self, views: Sequence[JobView]) -> bool:
        """Whether all agents of these jobs have left, or do so within moments.

        An agent ends its connection, on which the supervisor waits, a little before itself.
        """
        until = time.monotonic() + LEAVING_S
        while any(manned_by(self._run_dir, view.job) for view in views):
            if time.monotonic() >= until:
                return False
            time.sleep(CANCEL_EVERY_S)
        return True

    def _wait_until_gone(self, views: Sequence[JobView], for_s: float) -> list[JobView]:
        until = time.monotonic() + for_s
        jobs = [view.job for view in views]
        while (left := self._living(jobs)) and time.monotonic() < until:
            time.sleep(CANCEL_EVERY_S)
        return left
