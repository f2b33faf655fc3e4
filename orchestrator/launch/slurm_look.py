"""What Slurm says of a run's allocations: asked for all of them at once, and not too often."""

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from monitors.observations import Observation, Ok, Unknown
from orchestrator.core.events import Ending
from orchestrator.launch.launcher import Allocation
from orchestrator.launch.slurm_commands import (
    NoBooksError,
    SlurmError,
    SlurmRefused,
    end_in_the_books,
    job_record,
    jobs_by_id,
    nodes_named,
    reservations,
)
from orchestrator.launch.slurm_ending import (
    ENDING_OF,
    MAY_NOT_HAVE_STARTED,
    JobEnd,
    ending,
    scontrol_end,
    scontrol_excluded,
)
from orchestrator.launch.slurm_node_text import NodeView, Reservation, is_gone, leaving
from orchestrator.launch.slurm_text import JobFate, JobView, SlurmJobState

LOOK_EVERY_S = 10.0
LOOK_SLOWEST_S = 60.0
MOST_DOUBLINGS = 16  # a power that grew with every failure would overflow within an hour
RESERVATIONS_EVERY_S = 60.0
HELD_BY_SLURM = "JobHeldAdmin"


class SlurmLook:
    """Observes jobs; one look asks for every job that was asked for and lives.

    Args:
        run_dir: Its agents say there which job they belong to.
        reservation: The one that the run uses: that its nodes are in it means nothing.
        look_every_s: Slurm is asked at most this often, and less often while it fails: all of a
            site's users share one controller.
    """

    def __init__(
        self, run_dir: Path, reservation: str = "", look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._run_dir = run_dir
        self._reservation = reservation
        self._look_every_s = look_every_s
        self._failures = 0
        self._until = 0.0
        self._seen: dict[str, Observation[Allocation]] = {}
        self._over: dict[str, Observation[Allocation]] = {}
        self._has_books = True
        self._reserved: tuple[Reservation, ...] = ()
        self._reserved_until = 0.0

    def of(self, job: str, *, fresh: bool = False) -> Observation[Allocation]:
        """Say what is known of a job, after a new look when that is due; see `Launcher.observe`.

        What is known of one that is over for good is never asked for again.
        """
        if job in self._over:
            return self._over[job]
        if fresh or job not in self._seen or time.monotonic() >= self._until:
            self._seen = self._look({*self._seen, job})
            wait_s = self._look_every_s * 2.0 ** min(self._failures, MOST_DOUBLINGS)
            self._until = time.monotonic() + min(wait_s, LOOK_SLOWEST_S)
        return self._over[job] if job in self._over else self._seen[job]

    def forget(self) -> None:
        """Ask again at the next chance: something was changed."""
        self._until = 0.0

    def _look(self, jobs: set[str]) -> dict[str, Observation[Allocation]]:
        """Return what is seen of the jobs that live; the others are put to those that are over."""
        at = time.time()
        seen: dict[str, Observation[Allocation]] = {}
        try:
            views = jobs_by_id(sorted(jobs))
            nodes = self._nodes(views.values())
            leave = self._leaving(nodes, at)
        except (SlurmError, OSError) as error:
            self._failures += 1
            return dict.fromkeys(jobs, Unknown(why=str(error), source="slurm", at=at))
        failures = 0
        for job in jobs:
            # Each may need a question of its own, and what fails there says nothing of the others.
            try:
                value, is_final = self._allocation(job, views.get(job), nodes, leave)
            except (SlurmError, OSError) as error:
                failures = self._failures + 1
                seen[job] = Unknown(why=str(error), source="slurm", at=at)
                continue
            if value is None:
                why = f"job {job} is in a state unknown here"
                seen[job] = Unknown(why=why, source="slurm", at=at)
            else:
                found = Ok(value=value, source="slurm", at=at)
                (self._over if is_final else seen)[job] = found
        self._failures = failures
        return seen

    def _allocation(
        self,
        job: str,
        view: JobView | None,
        nodes: Mapping[str, NodeView],
        leave: Mapping[str, str],
    ) -> tuple[Allocation | None, bool]:
        """Return what is known of a job, None when that is nothing, and whether it is final."""
        fate = view.fate if view is not None else JobFate.GONE
        if view is None or fate is JobFate.GONE:
            how, why, is_final = self._ending(job, view)
            return Allocation(job=job, running=False, nodes={}, ending=how, why=why), is_final
        if fate is JobFate.UNKNOWN:
            return None, False
        return (
            Allocation(
                job=job,
                running=True,
                nodes=self._lost(view, nodes),
                queued=_queued(view),
                held=is_held(view),
                leaving={name: leave[name] for name in view.nodes if name in leave},
            ),
            False,
        )

    def _nodes(self, views: Iterable[JobView]) -> dict[str, NodeView]:
        """Ask for all nodes of all jobs that run."""
        running = (view for view in views if view.fate is JobFate.RUNNING)
        return nodes_named(sorted({name for view in running for name in view.nodes}))

    def _leaving(self, nodes: Mapping[str, NodeView], at: float) -> dict[str, str]:
        if nodes and time.monotonic() >= self._reserved_until:
            self._reserved = reservations()
            self._reserved_until = time.monotonic() + RESERVATIONS_EVERY_S
        now = datetime.fromtimestamp(at)  # noqa: DTZ006 - as Slurm's commands write times here
        return leaving(nodes.values(), self._reserved, now, self._reservation)

    def _lost(self, view: JobView, nodes: Mapping[str, NodeView]) -> dict[str, bool]:
        """Return the nodes that had an agent of this job and are lost.

        With --no-kill a node that Slurm marks down leaves the job's list of nodes for good, also
        when it is up again later.
        """
        if view.fate is not JobFate.RUNNING or not view.nodes:
            return {}
        gone = {name for name in view.nodes if name in nodes and is_gone(nodes[name].state)}
        manned = manned_by(self._run_dir, view.job)
        return {name: False for name in manned if name in gone or name not in view.nodes}

    def _ending(self, job: str, view: JobView | None) -> tuple[Ending, str, bool]:
        """Say how a job that is gone ended, why, and whether there is no more to be learnt."""
        if view is not None and view.state in (SlurmJobState.COMPLETING, SlurmJobState.STAGE_OUT):
            return Ending.UNKNOWN, "", False  # these words hide how
        record = scontrol_end(job_record(job)) if view is not None else None
        if record is None:
            record = self._from_the_books(job)
        if record is None:
            how = ENDING_OF[view.state] if view is not None else Ending.UNKNOWN
            return how, "", how is not Ending.UNKNOWN or not self._has_books
        how, why = ending(record, _nodes_of(record))
        return how, why, how is not Ending.UNKNOWN

    def _from_the_books(self, job: str) -> JobEnd | None:
        if not self._has_books:
            return None
        try:
            return end_in_the_books(job)
        except NoBooksError:
            self._has_books = False
        except SlurmRefused:
            pass
        return None


def manned_by(run_dir: Path, job: str) -> list[str]:
    """Return the nodes with an agent of this job: those of others are no business of it."""
    manned: list[str] = []
    for path in sorted((run_dir / "nodes").glob("*/agent.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is just leaving
            if json.loads(path.read_text(encoding="utf-8"))["job"] == job:
                manned.append(path.parent.name)
    return manned


def is_held(view: JobView) -> bool:
    """Whether a job waits until somebody releases it, because a launch of it failed."""
    if view.is_held:
        return True
    is_by_slurm = view.fate is JobFate.PENDING and view.reason == HELD_BY_SLURM
    return is_by_slurm and scontrol_excluded(job_record(view.job))[1] > 0


def _nodes_of(record: JobEnd) -> tuple[NodeView, ...]:
    if record.state not in MAY_NOT_HAVE_STARTED:
        return ()
    with contextlib.suppress(SlurmRefused):  # one of them is no node of this cluster any more
        return tuple(nodes_named(record.nodes).values())
    return ()


def _queued(view: JobView) -> str:
    """Say why a job has no nodes yet, "" when it has."""
    if view.fate is not JobFate.PENDING:
        return ""
    return f"{view.state.lower()}, {view.reason}" if view.reason else view.state.lower()
