"""Nodes from Slurm: one allocation of the world and its spares, one agent on each node.

Slurm says whether the allocation waits, runs or is gone, and which of its nodes are lost. It
cannot tell whether an agent lives; heartbeats do.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tenacity

from monitors.observations import Observation, Ok, Unknown
from orchestrator.launch.folders import folder_of, note_of
from orchestrator.launch.launcher import Allocation, AllocationSpec, LaunchRefusedError
from orchestrator.launch.slurm_commands import (
    SlurmError,
    SlurmRefused,
    SlurmUnavailable,
    allowed,
    cancel_job,
    job_by_id,
    node_states,
)
from orchestrator.launch.slurm_options import SlurmOptions
from orchestrator.launch.slurm_submit import request_of
from orchestrator.launch.slurm_text import JobFate, JobView, is_gone
from orchestrator.launch.submit import UNAVAILABLE_EXIT

log = logging.getLogger(__name__)

SUBMIT_TIMEOUT_S = 120.0
SUBMIT_TRIES = 3
SUBMIT_RETRY_S, SUBMIT_RETRY_LONGEST_S = 2.0, 15.0
LOOK_EVERY_S = 10.0
LOOK_SLOWEST_S = 60.0
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
        self._look_every_s = look_every_s
        self._failures = 0
        self._last: tuple[str, float, Observation[Allocation]] | None = None

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
        self._last = None
        try:
            return retrying(self._submit_once, spec)
        except SlurmRefused as error:
            raise LaunchRefusedError(str(error)) from error
        except SlurmUnavailable as error:
            raise LaunchRefusedError(f"Slurm does not answer: {error}") from error

    def _submit_once(self, spec: AllocationSpec) -> str:
        request = request_of(spec, self._options)
        folder = folder_of(spec)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "submit.log"
        with path.open("a+b") as file:
            began = file.tell()
            code = _run_child(request, allowed(os.environ, self._options.export), file.fileno())
            file.seek(began)
            lines = file.read().decode(errors="replace").split("\n")
        if code != 0:
            why = next((line for line in reversed(lines) if line.strip()), f"see {path}")
            raise (SlurmUnavailable if code == UNAVAILABLE_EXIT else SlurmRefused)(why.strip())
        return str(note_of(folder)["job"])

    def observe(self, job: str, *, fresh: bool = False) -> Observation[Allocation]:
        """Ask Slurm, or repeat its last answer while that is fresh; see `Launcher.observe`."""
        if self._last is not None:
            known, until, seen = self._last
            if not fresh and known == job and time.monotonic() < until:
                return seen
        seen = self._look(job)
        self._failures = self._failures + 1 if isinstance(seen, Unknown) else 0
        wait_s = min(self._look_every_s * 2**self._failures, LOOK_SLOWEST_S)
        self._last = job, time.monotonic() + wait_s, seen
        return seen

    def _look(self, job: str) -> Observation[Allocation]:
        at = time.time()
        try:
            view = job_by_id(job)
            fate = view.fate if view is not None else JobFate.GONE
            if view is not None and fate is JobFate.UNKNOWN:
                return Unknown(why=f"job {job} is in a state unknown here", source="slurm", at=at)
            value = Allocation(
                job=job,
                running=fate in (JobFate.PENDING, JobFate.RUNNING),
                nodes=self._lost_nodes(view) if view is not None else {},
                queued=_queued(view) if view is not None else "",
            )
        except (SlurmError, OSError) as error:
            return Unknown(why=str(error), source="slurm", at=at)
        return Ok(value=value, source="slurm", at=at)

    def _lost_nodes(self, view: JobView) -> dict[str, bool]:
        """Return the nodes that had an agent and are lost.

        With --no-kill a node that Slurm marks down leaves the job's list of nodes for good, also
        when it is up again later.
        """
        if view.fate is not JobFate.RUNNING or not view.nodes:
            return {}
        manned = self._manned(view.job)
        lost = [node for node in manned if node not in view.nodes]
        states = node_states([node for node in manned if node in view.nodes])
        lost += [node for node, state in states.items() if is_gone(state)]
        return dict.fromkeys(lost, False)

    def _manned(self, job: str) -> list[str]:
        """Return the nodes with an agent of this job: those of others are no business of it."""
        manned: list[str] = []
        for path in sorted((self._run_dir / "nodes").glob("*/agent.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it leaves
                if json.loads(path.read_text(encoding="utf-8"))["job"] == job:
                    manned.append(path.parent.name)
        return manned

    def unhold(self, job: str, exclude: Sequence[str]) -> None:
        """Let a held job try again; see `Launcher.unhold`."""
        raise NotImplementedError

    def cancel(self, job: str) -> None:
        """Give the allocation back; see `Launcher.cancel`.

        Agents that were told to leave end the job by themselves: it then counts as completed in
        the site's books, and not as cancelled.
        """
        self._last = None
        try:
            if self._wait_until_gone(job, GOODBYE_S if self._are_leaving() else 0.0):
                return
            cancel_job(job)
            if not self._wait_until_gone(job, CANCEL_TIMEOUT_S):
                log.warning("job %s is still there after scancel", job)
        except SlurmError as error:
            log.error("cannot cancel job %s (%s); do it by hand: scancel %s", job, error, job)
        finally:
            self._last = None

    def _are_leaving(self) -> bool:
        """Whether the job had agents and all of them have left, or do so within moments.

        An agent ends its connection, on which the supervisor waits, a little before itself.
        """
        nodes = self._run_dir / "nodes"
        until = time.monotonic() + LEAVING_S
        while nodes.is_dir() and any(nodes.glob("*/agent.json")):
            if time.monotonic() >= until:
                return False
            time.sleep(CANCEL_EVERY_S)
        return nodes.is_dir()

    def _wait_until_gone(self, job: str, for_s: float) -> bool:
        until = time.monotonic() + for_s
        while (view := job_by_id(job)) is not None and view.fate is not JobFate.GONE:
            if time.monotonic() >= until:
                return False
            time.sleep(CANCEL_EVERY_S)
        return True


def _queued(view: JobView) -> str:
    """Say why a job has no nodes yet, "" when it has."""
    if view.fate is not JobFate.PENDING:
        return ""
    return f"{view.state.lower()}, {view.reason}" if view.reason else view.state.lower()


def _run_child(request: dict[str, object], env: dict[str, str], output: int) -> int:
    """Run the submitting child, in a session of its own: it ends with its sbatch or not at all."""
    command = [sys.executable, "-m", "orchestrator.launch.submit", json.dumps(request)]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=env,
        start_new_session=True,
    )
    try:
        return child.wait(SUBMIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise SlurmUnavailable(f"submitting took longer than {SUBMIT_TIMEOUT_S:g} s") from None
