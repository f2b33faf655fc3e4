"""The ranks of one node: started, controlled, stopped and reaped, one attempt at a time."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from checkpointing.errors import (
    CHECKPOINT_DAMAGED_EXIT,
    RESTORE_FAILED_EXIT,
    STAGE_REFUSED_EXIT,
    STORE_AWAY_EXIT,
)
from checkpointing.slot import Control as SlotControl
from checkpointing.slot import Phase, SlotReading, SlotView, create
from monitors.logs.scan import Match, Scanner
from monitors.progress.process import abnormal
from orchestrator.agent.environment import (
    JobSpec,
    RankPaths,
    common_environment,
    rank_environment,
)
from orchestrator.agent.output import OutputCapture
from orchestrator.agent.process import RankProcess
from orchestrator.agent.saves import Saves
from orchestrator.agent.zygote import Zygote, can_fork
from orchestrator.core.events import RankExited, RanksStarted, ShardUploaded, SignatureSeen
from orchestrator.wire import (
    Control,
    FactEvent,
    FetchNode,
    RankReport,
    StartNode,
    StopNode,
)

log = logging.getLogger(__name__)

NOTES = {
    RESTORE_FAILED_EXIT: "restore_failed",
    CHECKPOINT_DAMAGED_EXIT: "checkpoint_damaged",
    STORE_AWAY_EXIT: "store_away",
    STAGE_REFUSED_EXIT: "stage_refused",
}
# What a script with a Checkpointer imports of everstep, and what its restore then imports late.
OWN_MODULES = (
    "checkpointing.checkpointer",
    "checkpointing.store.directory",
    "checkpointing.store.s3",
)
NOT_STARTED_EXIT = 127
LEAVE_POLL_S = 0.05
SAME_SIGNAL_S = 0.1  # the agent is sent what ended the rank as well, and tells of that first
DRAIN_S = 1.0  # grandchildren may hold the pipe open long after the rank itself is gone


@dataclass(slots=True)
class Rank:
    """One running rank with its files."""

    number: int
    process: RankProcess
    capture: OutputCapture
    slot: SlotView
    watcher: asyncio.Task[None] | None = None


class Ranks:
    """All ranks of the node. Facts about them go out through `fact`."""

    def __init__(
        self,
        spec: JobSpec,
        node_dir: Path,
        log_dir: Path,
        scanner: Scanner,
        fact: Callable[[FactEvent], None],
    ) -> None:
        self._spec = spec
        self._node_dir = node_dir
        self._log_dir = log_dir
        self._scanner = scanner
        self._fact = fact
        self._ranks: dict[int, Rank] = {}
        self._control = SlotControl(interval_steps=0)
        self._saves = Saves()
        env = common_environment(os.environ, spec)
        self._zygote = Zygote((*spec.preload, *OWN_MODULES), env) if spec.preload else None
        self.attempt = 0
        self.signature_counts: dict[str, int] = {}

    @property
    def running(self) -> tuple[Rank, ...]:
        """Ranks that have not been reaped."""
        return tuple(rank for rank in self._ranks.values() if rank.process.is_running)

    @property
    def lines(self) -> int:
        """Lines of output of this attempt so far."""
        return sum(rank.capture.lines for rank in self._ranks.values())

    def warm_up(self) -> None:
        """Have the zygote ready for the next start; returns at once."""
        if self._zygote is not None and can_fork(self._spec.argv):
            self._zygote.warm_up()

    def stay_warm(self) -> None:
        """Have the zygote again that somebody has killed; returns at once."""
        if self._zygote is not None:
            self._zygote.revive()

    async def start(self, order: StartNode) -> None:
        """Start the node's ranks of a new attempt; whatever ran before is killed first.

        Raises:
            OSError: The command, its directory or the node's memory cannot be used; nothing of
                the attempt is left running.
        """
        await self.stop_all(grace_s=0.0)
        self.attempt = order.attempt
        for former in self._ranks.values():
            former.slot.close()
        self._ranks = {}
        self._control = SlotControl(interval_steps=order.interval_steps)
        try:
            for local_rank in range(order.ranks):
                await self._start_one(order, local_rank)
        except BaseException:
            await self.stop_all(grace_s=0.0)
            for rank in self._ranks.values():
                rank.process.close()
            raise
        self._fact(
            RanksStarted(
                attempt=order.attempt,
                node=self._spec.node,
                ranks=tuple(self._ranks),
                pids=tuple(rank.process.pid for rank in self._ranks.values()),
            )
        )
        self.warm_up()
        for rank in self._ranks.values():
            rank.watcher = asyncio.ensure_future(self._watch(rank, order.attempt))

    def not_started(self, order: StartNode, error: OSError) -> None:
        """Report ranks that could not be started, as a shell would: exit code 127.

        A node without memory for their slots is one without memory for their checkpoints.
        """
        is_full = error.errno == errno.ENOSPC
        code = STAGE_REFUSED_EXIT if is_full else NOT_STARTED_EXIT
        why = f"cannot start {self._spec.argv[0]}: {error}"
        if is_full:
            why = f"no room in {self._node_dir.parent.parent} (nodes.memory_dir): {error.strerror}"
        first = order.node_rank * order.ranks
        for number in range(first, first + order.ranks):
            self._fact(
                RankExited(
                    attempt=order.attempt,
                    node=self._spec.node,
                    rank=number,
                    code=code,
                    ours=False,
                    note=NOTES.get(code, ""),
                    last_line=why[:300],
                )
            )

    def not_fetched(self, order: FetchNode, rank: int, why: str) -> None:
        """Report a rank whose part of the checkpoint could not be brought here: it cannot start."""
        text = f"rank {rank}: step {order.step} could not be brought from another place: {why}"
        self._fact(
            RankExited(
                attempt=order.attempt,
                node=self._spec.node,
                rank=rank,
                code=RESTORE_FAILED_EXIT,
                ours=False,
                note=NOTES[RESTORE_FAILED_EXIT],
                last_line=text[:300],
            )
        )

    async def _start_one(self, order: StartNode, local_rank: int) -> None:
        number = order.node_rank * order.ranks + local_rank
        paths = RankPaths(
            slot=self._node_dir / f"slot-{number}",
            arena=self._node_dir / f"arena-{number}",
            log=self._log_dir / f"attempt-{order.attempt:04d}" / f"rank-{number:05d}.log",
        )
        create(paths.slot)
        slot = SlotView(paths.slot)
        slot.set_control(self._control)
        env = rank_environment(os.environ, self._spec, order, local_rank, paths)
        process = await RankProcess.start(self._spec.argv, env, self._spec.workdir, self._zygote)
        capture = OutputCapture(
            paths.log, number, self._scanner, lambda match: self._matched(number, match)
        )
        self._ranks[number] = Rank(number, process, capture, slot)

    async def _watch(self, rank: Rank, attempt: int) -> None:
        """Copy the output, reap the rank, and report its end behind its last line."""
        copying = asyncio.ensure_future(rank.capture.run(rank.process.output))
        code = await rank.process.wait()
        ended = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(copying, DRAIN_S)
        rank.process.close()
        if code == -signal.SIGTERM and not rank.process.told_to_stop:
            await asyncio.sleep(SAME_SIGNAL_S)
        self._fact(
            RankExited(
                attempt=attempt,
                node=self._spec.node,
                rank=rank.number,
                code=code,
                ours=rank.process.told_to_stop and code != 0,
                note=NOTES.get(code, ""),
                age_s=time.monotonic() - ended,
                last_line=rank.capture.last_line,
            )
        )

    def _matched(self, rank: int, match: Match) -> None:
        name = match.signature
        self.signature_counts[name] = self.signature_counts.get(name, 0) + 1
        seen = match.evidence(seq=0, at=0.0, node=self._spec.node, rank=rank)
        self._fact(
            SignatureSeen(
                attempt=self.attempt,
                node=self._spec.node,
                rank=rank,
                signature=name,
                fault=match.fault.value,
                secondary=match.secondary,
                confidence=match.confidence,
                culprit_node=seen.culprit_node,
                culprit_rank=seen.culprit_rank,
                text=match.text,
            )
        )

    def reports(self) -> tuple[RankReport, ...]:
        """Return the heartbeats of running ranks; a rank that wrote none is left out."""
        now = time.monotonic()
        readings = [(rank, rank.slot.read()) for rank in self.running]
        return tuple(
            self._report(rank, reading, now) for rank, reading in readings if reading is not None
        )

    def _report(self, rank: Rank, reading: SlotReading, now: float) -> RankReport:
        self._saves.note(rank.number, self.attempt, reading)
        age_s = now - reading.phase_since
        allowed_s = self._allowed_s(reading.phase, reading.allowed_s)
        return RankReport(
            rank=rank.number,
            step=reading.step,
            phase=reading.phase.value,
            phase_age_s=age_s,
            allowed_s=allowed_s,
            loss=reading.loss,
            step_s=reading.step_s,
            stall_s=reading.stall_s,
            saves=reading.saves,
            skipped_saves=reading.skipped_saves,
            dropped_saves=reading.dropped_saves,
            tokens=reading.tokens,
            abnormal=abnormal(rank.process.pid) if age_s > allowed_s else "",
        )

    def with_cost(self, event: ShardUploaded) -> ShardUploaded:
        """Return a report of an upload with what the save cost its rank."""
        rank = self._ranks.get(event.rank)
        reading = rank.slot.read() if rank is not None else None
        if reading is not None:
            self._saves.note(event.rank, self.attempt, reading)
        return self._saves.add_to(event)

    def _allowed_s(self, phase: Phase, told: float) -> float:
        """Return the phase's bound; starting and restoring get the run's own, longer one."""
        if phase in (Phase.INIT, Phase.RESTORE):
            return self._spec.init_timeout_s
        return told if told != float("inf") else float("nan")

    def control(self, order: Control) -> None:
        """Change what the ranks read at their next step boundary."""
        known = self._control
        self._control = replace(
            known,
            interval_steps=_or(order.interval_steps, known.interval_steps),
            effective_step=_or(order.effective_step, known.effective_step),
            snapshot_step=_or(order.snapshot_step, known.snapshot_step),
        )
        self._write_control()

    def _write_control(self) -> None:
        for rank in self.running:
            rank.slot.set_control(self._control)

    async def stop(self, order: StopNode) -> None:
        """Stop the node's ranks; a planned stop first waits for them to save and leave."""
        if order.planned and self.reports():
            self._control = replace(self._control, stop_step=order.stop_step)
            self._write_control()
            await self._until_left(order)
        await self.stop_all(order.grace_s)

    async def _until_left(self, order: StopNode) -> None:
        """Wait until the ranks have left, or go on training behind the step where they saved.

        A script that does not look at `should_stop` has saved all the same.
        """
        saved_at: dict[int, int] = {}
        deadline = time.monotonic() + order.save_s
        while (running := self.running) and time.monotonic() < deadline:
            for rank in running:
                reading = rank.slot.read()
                if reading is None or reading.step < order.stop_step:
                    break
                if reading.step == saved_at.setdefault(rank.number, reading.step):
                    break
            else:
                log.warning("the script saved, but does not look at should_stop; ending it")
                return
            await asyncio.sleep(LEAVE_POLL_S)

    async def close(self, grace_s: float) -> None:
        """End the ranks and the zygote."""
        await self.stop_all(grace_s)
        if self._zygote is not None:
            await self._zygote.close()

    async def stop_all(self, grace_s: float) -> None:
        """End every rank that still runs, all at once."""
        running = self.running
        for rank in running:
            rank.slot.set_control(replace(self._control, terminate=True))
        await asyncio.gather(*(rank.process.stop(grace_s, _deaf(rank)) for rank in running))
        watchers = [rank.watcher for rank in running if rank.watcher]
        if watchers:
            await asyncio.wait(watchers, timeout=DRAIN_S * 2)


def _deaf(rank: Rank) -> int:
    """Return the process that would not end by SIGTERM in time, 0 for none."""
    reading = rank.slot.read()
    return reading.pid if reading is not None and reading.guarded else 0


def _or(asked: int, known: int) -> int:
    return asked if asked >= 0 else known
