"""The supervisor's loop: events in, journal, fold, decide, journal, effects out."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

from checkpointing.store.base import ObjectStore
from orchestrator.config import RunConfig
from orchestrator.core import events as ev
from orchestrator.core.decide import decide
from orchestrator.core.events import AgentLost, Event
from orchestrator.core.fold import fold
from orchestrator.core.record import Origin, Record
from orchestrator.core.state import State
from orchestrator.durable import write_json
from orchestrator.errors import PreconditionError
from orchestrator.launch.launcher import Launcher
from orchestrator.ledger import ledger_of
from orchestrator.supervisor import judge
from orchestrator.supervisor.allocations import spec_of
from orchestrator.supervisor.costs import SaveCosts
from orchestrator.supervisor.execute import GOODBYE_S, Context, Executor
from orchestrator.supervisor.inbound import Inbound, is_repeated, live_attempt_of, strangers
from orchestrator.supervisor.journal import Journal
from orchestrator.supervisor.lease import LEASE_S, Lease
from orchestrator.supervisor.looks import Looks
from orchestrator.supervisor.probe import Prober
from orchestrator.supervisor.retention import Retention
from orchestrator.supervisor.scrape import EVERY_S as SCRAPE_S
from orchestrator.supervisor.scrape import Scraper
from orchestrator.supervisor.server import Pages, Server
from orchestrator.supervisor.sessions import Sessions
from orchestrator.supervisor.suspicion import Limits
from orchestrator.supervisor.watch import Watch
from orchestrator.views.history import History
from orchestrator.views.metrics import render as render_metrics
from orchestrator.views.page import render_page
from orchestrator.views.status import status
from orchestrator.wire import Fact, Hello, Report, Welcome

log = logging.getLogger(__name__)

TICK_S = 0.05
LONGEST_TICK_S = 5.0

Watcher = Callable[[State, History, Sequence[Record]], None]


class Supervisor:
    """One supervisor's time in office."""

    def __init__(
        self,
        config: RunConfig,
        *,
        state: State,
        history: History,
        journal: Journal,
        lease: Lease,
        launcher: Launcher,
        store: ObjectStore | None,
        token: str,
        watcher: Watcher | None = None,
    ) -> None:
        self._config = config
        self.state = state
        self._history = history
        self._scraper = Scraper()
        self._costs = SaveCosts()
        self._journal = journal
        self._lease = lease
        self._store = store
        self._watcher = watcher
        self._inbox: asyncio.Queue[Inbound] = asyncio.Queue()
        self._kept_back: dict[str, tuple[AgentLost, float]] = {}
        self._last_tick = self._recorded = time.monotonic()
        times = config.timeouts
        limits = Limits(heartbeat_s=times.heartbeat_s, agent_lost_s=times.agent_lost_s)
        self.watch = Watch(time.monotonic(), limits)
        self._prober = Prober(self.watch.answered)
        ledger = ledger_of(config)
        self._looks = Looks(launcher, ledger, self.watch, lambda: self.state, self.emit)
        self.sessions = Sessions(
            token, self._greet, self._fact, self._report, self._gone, self._is_former
        )
        self.server = Server(config.server.host, config.server.port, self.sessions, self._pages())
        context = Context(
            state=lambda: self.state,
            step_ahead=lambda: self.watch.step_ahead(time.monotonic()),
            emit=self.emit,
            cost_of=lambda key: self._costs.of(key, self.state, self._now()),
        )
        self._executor = Executor(
            self.sessions, launcher, store, ledger, spec_of(config), context, _goodbye_s(config)
        )

    def emit(self, event: Event) -> None:
        """Hand an event to the loop."""
        self._inbox.put_nowait(Inbound(event))

    @property
    def is_healthy(self) -> bool:
        """Whether the loop turned lately."""
        return time.monotonic() - self._last_tick < LONGEST_TICK_S

    def _pages(self) -> Pages:
        return Pages(
            status=self._status,
            page=lambda: render_page(self._status()),
            metrics=lambda: render_metrics(lambda: (self.state, self._history)),
            healthy=lambda: self.is_healthy,
            said=lambda what: self.emit(ev.OperatorSaid(what=what)),
        )

    def _status(self) -> dict[str, Any]:
        about = {"url": self.server.url, "alive": True}
        value = status(self.state, self._history, time.time(), about)
        for node in value["nodes"]:
            node["exporter"] = self._scraper.of(node["name"])
        return value

    async def run(self) -> State:
        """Supervise until the run is over; returns its last state.

        Raises:
            LeaseLost: A later supervisor took over.
            PreconditionError: The port is taken, or the journal cannot be written.
        """
        await self.server.start()
        tasks = []
        try:
            self._open()
            self._announce()
            for pending in tuple(self.state.pending.values()):
                self._executor.start(pending)
            tasks = [
                asyncio.ensure_future(work)
                for work in (
                    self._renew(),
                    self._scrape(),
                    self._looks.observe(),
                    self._looks.read_ledger(),
                )
            ]
            tasks += [asyncio.ensure_future(work) for work in self._store_work()]
            while not self.state.over:
                await self._turn(tasks)
            return self.state
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._scraper.close()
            await self._prober.close()
            await self._executor.close()
            await self.server.stop()

    def _store_work(self) -> "Iterator[Coroutine[Any, Any, None]]":
        """Yield what goes on beside the loop with the store."""
        store, run = self._store, self._config.run.name
        if store is None:
            return
        yield self._looks.read_catalogue(store, run)
        yield self._looks.read_quarantine(store, run)
        if (keep := self._config.checkpoint.keep) is not None:
            retention = Retention(store, run, keep.policy(), lambda: self.state, self.emit)
            yield retention.run()

    def _open(self) -> None:
        """Write the first records of this epoch."""
        config, state = self._config, self.state
        opening: list[Event] = []
        if state.run is None:
            opening.append(
                ev.RunRequested(
                    run=config.run.name,
                    nodes=config.nodes.count,
                    spares=config.nodes.spares,
                    ranks_per_node=config.nodes.ranks_per_node,
                    interval_steps=config.checkpoint.interval_steps,
                    checkpoints=self._store is not None,
                    attempts_before=state.last_attempt,
                    committed_before=state.committed_before,
                    on_disks_before=state.on_disks,
                )
            )
        opening.append(ev.LeaseTaken(epoch=self._lease.epoch, holder=self._lease.holder))
        if state.policy != config.policy():
            opening.append(ev.PolicySet(policy=config.policy()))
        self._append([Inbound(event) for event in opening])
        if (said := self._looks.ledger_now()) is not None:  # the first decision may name nodes
            self._append([Inbound(said)])

    def _announce(self) -> None:
        value = {"url": self.server.url, "epoch": self._lease.epoch, "holder": self._lease.holder}
        write_json(self._config.run_dir / "supervisor.json", value)

    async def _turn(self, tasks: Sequence["asyncio.Future[None]"]) -> None:
        """Take what has come in, and everything that follows from it."""
        batch: list[Inbound] = []
        # Not wait_for: before Python 3.12 it loses a cancellation that comes with the result.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                batch.append(await self._inbox.get())
        while not self._inbox.empty():
            batch.append(self._inbox.get_nowait())
        for task in tasks:
            if task.done():
                task.result()
        now = time.monotonic()
        batch += [Inbound(e) for e in self.watch.heartbeats(self.state, now)]
        lost, probes = self.watch.silent(self.state, now)
        batch += self._losses(lost, now)
        for probe in probes:
            self._prober.send(probe)
        self._append(batch)
        self._acknowledge(batch)
        for session in strangers(self.state, self.sessions.all(), batch, now):
            session.cut()
        while self._decide_once():
            pass
        self._last_tick = time.monotonic()

    def _losses(self, lost: Sequence[AgentLost], now: float) -> list[Inbound]:
        """Return the losses that count, and keep those back that may be this machine's own fault.

        When no agent is left that is heard, the launcher must have answered since they fell
        silent: else rather this machine is cut off than all the others lost. Of an allocation
        that is over it has said all that it will.
        """
        state = self.state
        for event in lost:
            self._kept_back.setdefault(event.node, (event, now))  # the first says most
        for node, (event, _) in tuple(self._kept_back.items()):
            if not state.is_current(node, event.incarnation) or self.watch.has_heard(node):
                del self._kept_back[node]
        if not self._kept_back:
            return []
        silent_since = min(at - event.silent_s for event, at in self._kept_back.values())
        is_anyone_left = any(
            n.alive and n.name not in self._kept_back for n in state.nodes.values()
        )
        counted = set(self._kept_back)
        if not is_anyone_left and not self._looks.has_answer_since(silent_since):
            counted &= {n for a in state.allocations if a.is_over for n in state.members(a)}
        told = [self._kept_back.pop(node) for node in tuple(self._kept_back) if node in counted]
        return [Inbound(replace(e, silent_s=e.silent_s + now - at)) for e, at in told]

    def _decide_once(self) -> bool:
        """Judge, or make and begin one decision; False when nothing is due."""
        attempt = self.state.attempt
        if attempt is not None and attempt.needs_verdict:
            self._append([Inbound(judge.verdict_on(attempt, self.state.nodes))])
            return True
        now = self._now()
        decisions = decide(self.state, now, self.state.policy)
        if not decisions:
            return False
        decision = decisions[0]
        self._append([Inbound(ev.DecisionMade(decision=decision))], now)
        pending = self.state.pending.get(decision.key)
        if pending is not None:
            self._executor.start(pending)
        return True

    def _append(self, batch: Sequence[Inbound], at: float | None = None) -> None:
        """Make events durable, then let them count. Repetitions are left out."""
        at = self._now() if at is None else at
        records: list[tuple[Record, State]] = []
        state = self.state
        for inbound in batch:
            if is_repeated(state, inbound.origin):
                continue
            record = Record(
                seq=state.seq + 1,
                at=at,
                epoch=self._lease.epoch,
                event=inbound.event,
                origin=inbound.origin,
            )
            state = fold(state, record)
            records.append((record, state))
        if not records:
            return
        try:
            self._lease.check()
            self._journal.append([record for record, _ in records])
        except OSError as error:
            raise PreconditionError(
                f"cannot write the journal in {self._config.run_dir}: {error.strerror}; "
                "the ranks go on; make room and start the supervisor again"
            ) from error
        self.state, self._recorded = state, time.monotonic()
        self._executor.drop_all_but(state.pending)
        for record, after in records:
            self._history.see(record, after)
        self._show([record for record, _ in records])

    def _show(self, records: Sequence[Record]) -> None:
        """Let the onlooker know; one whose terminal is gone must not end the run."""
        if self._watcher is None:
            return
        try:
            self._watcher(self.state, self._history, records)
        except OSError as error:
            self._watcher = None
            log.warning("nothing is shown any more: %s", error)

    def _now(self) -> float:
        """Return the wall clock, or the last record's time and what has passed since.

        A clock that was ahead for a moment must not stop every timeout until it is caught up with.
        """
        return max(time.time(), self.state.at + time.monotonic() - self._recorded)

    def _acknowledge(self, batch: Sequence[Inbound]) -> None:
        last: dict[str, Origin] = {}
        for inbound in batch:
            if inbound.origin is not None:
                last[inbound.origin.node] = inbound.origin
        for origin in last.values():
            self.sessions.ack(origin.node, origin.incarnation, origin.n)

    def _greet(self, hello: Hello) -> Welcome:
        if self._is_former(hello):  # nothing that it says counts; its ranks are to end
            return Welcome(epoch=self._lease.epoch, acked=0, attempt=0)
        self.watch.connected(hello.node, time.monotonic())
        self.emit(
            ev.AgentJoined(
                node=hello.node,
                incarnation=hello.incarnation,
                address=hello.address,
                metrics_url=hello.metrics_url,
                attempt=hello.attempt,
                staged=hello.staged,
                job=hello.job,
                unfit=hello.unfit,
                replicas=hello.replicas,
                replica_address=hello.replica_address,
            )
        )
        incarnation, n = self.state.seen.get(hello.node, ("", 0))
        return Welcome(
            epoch=self._lease.epoch,
            acked=n if incarnation == hello.incarnation else 0,
            attempt=live_attempt_of(self.state, hello.node),
        )

    def _is_former(self, hello: Hello) -> bool:
        return self.state.is_fenced(hello.node, hello.incarnation)

    def _fact(self, hello: Hello, fact: Fact) -> None:
        if self._is_former(hello):
            return
        self.watch.alive(hello.node, time.monotonic())
        origin = Origin(node=hello.node, incarnation=hello.incarnation, n=fact.n)
        self._inbox.put_nowait(Inbound(self._costs.keep(fact.event), origin))

    def _report(self, hello: Hello, report: Report) -> None:
        if self._is_former(hello):
            return
        self.watch.reported(hello.node, report, time.monotonic())

    def _gone(self, hello: Hello) -> None:
        self.watch.disconnected(hello.node, time.monotonic())
        self._looks.hurry()

    async def _renew(self) -> None:
        """Renew the lease; a file system away for a moment is no reason to leave.

        Should others have taken over meanwhile, the next renewal or append finds out.
        """
        while True:
            await asyncio.sleep(LEASE_S / 4)
            try:
                self._lease.renew()
            except OSError as error:
                log.warning("cannot renew the lease, trying again: %s", error)

    async def _scrape(self) -> None:
        while True:
            await self._scraper.once(self.state)
            await asyncio.sleep(SCRAPE_S)


def _goodbye_s(config: RunConfig) -> float:
    """Return how long agents may take to leave: the last folder that they watch has to be sent."""
    watches = config.checkpoint.watch is not None
    return GOODBYE_S + (config.timeouts.final_upload_s if watches else 0.0)
