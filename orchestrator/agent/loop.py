"""The agent: carries out orders, reports what its ranks do, outlives them.

It decides nothing. It refuses orders of an older supervisor (epoch) and of an older attempt, and
ends ranks that are no longer part of the live attempt.
"""

import asyncio
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpointing.stage.arena import UploadState, peek
from monitors.logs.scan import Scanner
from orchestrator.agent.connection import Connection
from orchestrator.agent.environment import job_spec
from orchestrator.agent.exporter import AgentExporter
from orchestrator.agent.fitness import LOOK_EVERY_S, Fitness
from orchestrator.agent.leaving import Leaving
from orchestrator.agent.lifeline import Orphans, become_subreaper
from orchestrator.agent.ranks import Ranks
from orchestrator.agent.replicas import Replicas, place_of
from orchestrator.agent.uploads import Uploads
from orchestrator.agent.watched import Watched
from orchestrator.config import RunConfig
from orchestrator.core.events import (
    RankExited,
    RanksGone,
    ShardUploaded,
    Staged,
    StagedShard,
    UploadFailed,
)
from orchestrator.wire import (
    Buddy,
    Control,
    FactEvent,
    FetchNode,
    Hello,
    Order,
    Outcome,
    Report,
    ReservePort,
    Shutdown,
    StartNode,
    StopNode,
    Welcome,
)

log = logging.getLogger(__name__)

TICK_S = 0.1
ORPHANS_S = 5.0
KEPT_OUTCOMES = 256
SETTLE_S = 2.0
UNSENT = (UploadState.NONE, UploadState.UPLOADING)


class Agent:
    """One node's agent, from its start to its shutdown; `job` is its allocation's id.

    Attributes:
        leaving: What is to be told of signals that announce the end of the allocation.
    """

    def __init__(
        self, config: RunConfig, node: str, node_dir: Path, address: str, job: str = ""
    ) -> None:
        self._config = config
        self._job = job
        self._node = node
        self._node_dir = node_dir
        self._address = address
        self._incarnation = uuid.uuid4().hex[:12]
        self._epoch = 0
        self._outcomes: dict[str, asyncio.Future[Outcome]] = {}
        self._port: tuple[int, socket.socket] | None = None
        self._staged: tuple[StagedShard, ...] = ()
        self._done = asyncio.Event()
        self._over = 0  # attempts up to this one were stopped here and are never started again
        self._stops: set[asyncio.Future[None]] = set()
        self._changing = asyncio.Lock()  # a stop in the middle of a start would miss some ranks
        self._connection = Connection(config.run_dir, self._hello, self._welcomed, self._ordered)
        times = config.timeouts
        self.leaving = Leaving(
            node, times.leave_s, times.kill_grace_s, self._connection, self.shut_down
        )
        spec = job_spec(config, node)
        self._ranks = Ranks(spec, node_dir, config.run_dir / "logs", Scanner(), self._rank_fact)
        self._exporter = AgentExporter(config.run.name, node, self._ranks)
        self._fitness = Fitness(config, self._exporter.read_gpus)
        self._unfit = ""
        self._uploads = (
            Uploads(node_dir, spec.store_json, spec.run, self._upload_fact)
            if config.checkpoint.store
            else None
        )
        watches = config.checkpoint.watch is not None
        self._watched = (
            Watched(config, node, node_dir, spec.store_json, self._connection.fact)
            if watches
            else None
        )
        self._replicas = (
            Replicas(place_of(config, node, node_dir, address), self._connection.fact)
            if config.checkpoint.has_replicas
            else None
        )
        self._exporter.replicas = self._replicas

    async def run(self) -> None:
        """Serve until told to shut down, or until the supervisor has been gone too long."""
        become_subreaper()
        self._ranks.warm_up()
        await self._exporter.start(self._address)
        tasks: list[asyncio.Future[Any]] = []
        if self._replicas is not None:
            tasks.append(asyncio.ensure_future(self._replicas.run()))
            await self._replicas.ready()  # what lies on the disk may be all that is left of the run
        self._unfit = await self._fitness.look()
        connection: asyncio.Future[Any] = asyncio.ensure_future(self._connection.run())
        tasks += [
            asyncio.ensure_future(work) for work in (self._report_for_ever(), self._stay_fit())
        ]
        if self._uploads is not None:
            tasks.append(asyncio.ensure_future(self._uploads.run()))
        if self._watched is not None:
            tasks.append(asyncio.ensure_future(self._watched.run()))
        tasks.append(asyncio.ensure_future(self._done.wait()))
        await asyncio.wait((connection, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in (connection, *tasks):
            if task.done() and task.exception() is not None:
                log.error("the agent failed", exc_info=task.exception())
        await self._end_ranks()
        if self._replicas is not None:
            self._replicas.grace_s = min(self._replicas.grace_s, self.leaving.uploads_s)
        if self._uploads is not None:
            await self._until_sent()
            self._uploads.grace_s = min(self._uploads.grace_s, self.leaving.uploads_s)
        if self._watched is not None:
            self._watched.grace_s = min(self._watched.grace_s, self.leaving.uploads_s)
        await _end(tasks)
        await self._exporter.stop()
        self._release_port()
        shutil.rmtree(self._node_dir, ignore_errors=True)
        await self._connection.settle(min(SETTLE_S, self.leaving.left_s))
        # Last: the supervisor takes this for the agent's own end, and the memory for free.
        await _end([connection])

    async def _end_ranks(self) -> None:
        """End the ranks and tell of it; one that cannot be reaped is left when time is up."""
        left_s = self.leaving.left_s if self.leaving.begun else None
        try:
            async with asyncio.timeout(left_s):
                await self._ranks.close(self.leaving.ranks_s)
        except TimeoutError:
            log.error("not all ranks could be ended in time")
        if self._stops:
            await asyncio.wait(self._stops, timeout=SETTLE_S)

    async def _until_sent(self) -> None:
        """When the allocation ends, give what was staged last the time that there is."""
        while self.leaving.begun and self.leaving.uploads_s > 0.0:
            slots = [slot for path in self._arenas() for slot in peek(path)]
            if not any(slot.is_for_store and slot.upload_state in UNSENT for slot in slots):
                return
            await asyncio.sleep(TICK_S)

    def shut_down(self) -> None:
        """End the agent; safe to call from a signal handler of the loop, and twice."""
        self._done.set()

    def _hello(self) -> Hello:
        return Hello(
            node=self._node,
            incarnation=self._incarnation,
            pid=os.getpid(),
            address=self._address,
            metrics_url=self._exporter.url,
            attempt=self._ranks.attempt if self._ranks.running else 0,
            staged=self._read_staged(),
            job=self._job,
            unfit=self._unfit,
            replicas=self._replicas.held if self._replicas is not None else (),
            replica_address=self._replicas.address if self._replicas is not None else "",
        )

    async def _stay_fit(self) -> None:
        """Look at the node while it is idle, and say what has become of it."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._ranks.running:
                continue
            found = await self._fitness.look()
            if found != self._unfit:
                self._unfit = found
                await self._connection.introduce_again()

    async def _welcomed(self, welcome: Welcome) -> None:
        self._epoch = max(self._epoch, welcome.epoch)
        async with self._changing:
            if not self._ranks.running or self._ranks.attempt == welcome.attempt:
                return
            log.warning("attempt %d is over; ending its ranks", self._ranks.attempt)
            await self._ranks.stop_all(grace_s=0.0)
        await self._connection.introduce_again()

    async def _ordered(self, order: Order) -> Outcome:
        if order.epoch < self._epoch:
            text = f"epoch {order.epoch} is over, {self._epoch} is in force"
            return Outcome(key=order.key, ok=False, detail=text)
        self._epoch = order.epoch
        outcome = self._outcomes.get(order.key)
        if outcome is None:
            outcome = asyncio.ensure_future(self._carry_out(order))
            self._outcomes[order.key] = outcome
            while len(self._outcomes) > KEPT_OUTCOMES:
                del self._outcomes[next(iter(self._outcomes))]
        return await asyncio.shield(outcome)

    async def _carry_out(self, order: Order) -> Outcome:
        try:
            return await self._do(order)
        except Exception as error:
            log.exception("%s failed", order.key)
            return Outcome(key=order.key, ok=False, detail=f"{type(error).__name__}: {error}")

    async def _do(self, order: Order) -> Outcome:
        match order.body:
            case ReservePort(attempt=attempt):
                return Outcome(key=order.key, ok=True, detail=str(self._reserve_port(attempt)))
            case StartNode() as start:
                return await self._start(order.key, start)
            case StopNode() as stop:
                self._over = max(self._over, stop.attempt)
                if self._replicas is not None:
                    self._replicas.give_up()
                task = asyncio.ensure_future(self._stop(stop))
                self._stops.add(task)
                task.add_done_callback(self._stops.discard)
            case Control() as control if control.attempt == self._ranks.attempt:
                self._ranks.control(control)
            case Control(attempt=attempt):
                text = f"no ranks of attempt {attempt} here"
                return Outcome(key=order.key, ok=False, detail=text)
            case FetchNode() as fetch:
                return await self._fetch(order.key, fetch)
            case Buddy(address=address) if self._replicas is not None:
                self._replicas.point_at(address)
            case Buddy():
                return Outcome(key=order.key, ok=False, detail="no copies are made here")
            case Shutdown():
                asyncio.get_running_loop().call_later(TICK_S, self.shut_down)
        return Outcome(key=order.key, ok=True)

    async def _stop(self, stop: StopNode) -> None:
        """Stop an attempt's ranks, and say so even when none of them was ever started."""
        async with self._changing:
            if stop.attempt == self._ranks.attempt:
                await self._ranks.stop(stop)
        self._connection.fact(RanksGone(attempt=stop.attempt, node=self._node))

    async def _start(self, key: str, start: StartNode) -> Outcome:
        async with self._changing:
            newest = max(self._ranks.attempt, self._over)
            if self._done.is_set():
                return Outcome(key=key, ok=False, detail="the agent is about to leave")
            if start.attempt <= newest:
                text = f"attempt {start.attempt} is not newer than {newest}"
                return Outcome(key=key, ok=False, detail=text)
            try:
                if self._watched is not None:
                    self._watched.attempt(start)
                await self._ranks.start(start)
            except OSError as error:
                self._ranks.not_started(start, error)
            return Outcome(key=key, ok=True)

    async def _fetch(self, key: str, fetch: FetchNode) -> Outcome:
        """Bring what the ranks of the next attempt lack; what fails is a failed restore."""
        if fetch.attempt <= max(self._ranks.attempt, self._over):
            return Outcome(key=key, ok=False, detail=f"attempt {fetch.attempt} is over")
        if self._replicas is None:
            errors = {rank.rank: "no copies are kept here" for rank in fetch.ranks}
        else:
            errors = await self._replicas.fetch(fetch)
        if fetch.attempt <= self._over:
            return Outcome(key=key, ok=False, detail=f"attempt {fetch.attempt} is over")
        for rank, why in errors.items():
            self._ranks.not_fetched(fetch, rank, why)
        self._tell_staged()
        texts = [f"rank {rank}: {why}" for rank, why in errors.items()]
        return Outcome(key=key, ok=not errors, detail="; ".join(texts)[:500])

    def _reserve_port(self, attempt: int) -> int:
        """Hold a free port for the attempt's rendezvous until the next attempt.

        The socket is bound but never listens, so the rank's store can bind the port as well
        (SO_REUSEADDR), while the kernel gives it to nobody who asks for any free port.
        """
        if self._port is None or self._port[0] != attempt:
            self._release_port()
            holder = socket.socket()
            try:
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind((self._address, 0))
            except OSError:
                holder.close()
                raise
            self._port = attempt, holder
        return int(self._port[1].getsockname()[1])

    def _release_port(self) -> None:
        if self._port is not None:
            self._port[1].close()
            self._port = None

    async def _report_for_ever(self) -> None:
        every = self._config.timeouts.heartbeat_s
        next_report = next_look = time.monotonic()
        orphans = Orphans()
        while True:
            await asyncio.sleep(min(TICK_S, every))
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + ORPHANS_S
                orphans.reap([rank.process.pid for rank in self._ranks.running])
                self._ranks.stay_warm()
            self._tell_staged()
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + every
                report = Report(attempt=self._ranks.attempt, ranks=self._ranks.reports())
                self._connection.report(report)
            alone_s = self._connection.alone_s
            if alone_s > self._config.timeouts.supervisor_lost_s:
                log.error("no supervisor for %.0f s; ending the ranks and leaving", alone_s)
                return

    def _rank_fact(self, event: FactEvent) -> None:
        """Pass on a fact about a rank, and what it staged before its end.

        The supervisor would otherwise take the run for finished without waiting for that upload.
        """
        if isinstance(event, RankExited):
            self._tell_staged()
        self._connection.fact(event)

    def _upload_fact(self, event: ShardUploaded | UploadFailed) -> None:
        if isinstance(event, ShardUploaded):
            event = self._ranks.with_cost(event)
        self._connection.fact(event)

    def _tell_staged(self) -> None:
        staged = self._read_staged()
        if staged != self._staged:
            self._staged = staged
            self._connection.fact(Staged(node=self._node, shards=staged))

    def _read_staged(self) -> tuple[StagedShard, ...]:
        shards = [
            StagedShard(
                rank=slot.rank,
                step=slot.step,
                attempt=slot.attempt,
                world=slot.world,
                for_store=slot.is_for_store,
            )
            for path in self._arenas()
            for slot in peek(path)
        ]
        return tuple(sorted(shards, key=lambda s: (s.rank, s.step, s.attempt)))

    def _arenas(self) -> Iterator[Path]:
        return self._node_dir.glob("arena-*")


async def _end(tasks: "list[asyncio.Future[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
