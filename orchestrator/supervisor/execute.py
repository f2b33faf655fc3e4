"""Carries out decisions. What comes of one is told only by events, never by return values."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, replace

from checkpointing.commit import UploadRecord, commit
from checkpointing.errors import CommitRefused, StoreError
from checkpointing.store.base import ObjectStore
from orchestrator.core import events as ev
from orchestrator.core.actions import (
    Commit,
    Finish,
    GiveBack,
    Launch,
    NoteNode,
    Pair,
    Prune,
    Quarantine,
    SetInterval,
    Snapshot,
    StartRanks,
    StopRanks,
    Unhold,
)
from orchestrator.core.ledger import NodeIncident
from orchestrator.core.saves import SaveCost
from orchestrator.core.state import Pending, State
from orchestrator.errors import LedgerUnavailable
from orchestrator.launch.launcher import (
    AllocationSpec,
    Launcher,
    LaunchRefusedError,
    LaunchUnknownError,
)
from orchestrator.ledger import Ledger
from orchestrator.supervisor.fetching import orders as fetch_orders
from orchestrator.supervisor.keeping import prune, put_in_quarantine
from orchestrator.supervisor.sessions import Sessions
from orchestrator.wire import (
    Buddy,
    Control,
    OrderBody,
    Outcome,
    ReservePort,
    Shutdown,
    StartNode,
    StopNode,
)

log = logging.getLogger(__name__)

ORDER_TIMEOUT_S = 10.0
GOODBYE_S = 20.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What an effect may look at besides its action.

    Attributes:
        step_ahead: A step that an order given now reaches all ranks before. The journal knows
            only now and then how far they are, so what a decision asks for may be behind them.
        cost_of: What the save of a step and attempt cost, None when nobody knows.
    """

    state: Callable[[], State]
    step_ahead: Callable[[], int]
    emit: Callable[[ev.Event], None]
    cost_of: Callable[[tuple[int, int]], SaveCost | None] = lambda _: None


class Executor:
    """Runs each pending action as a task; a key that is running is not started twice."""

    def __init__(
        self,
        sessions: Sessions,
        launcher: Launcher,
        store: ObjectStore | None,
        ledger: Ledger,
        spec: AllocationSpec,
        context: Context,
        goodbye_s: float = GOODBYE_S,
    ) -> None:
        self._goodbye_s = goodbye_s
        self._sessions = sessions
        self._launcher = launcher
        self._store = store
        self._ledger = ledger
        self._spec = spec
        self._context = context
        self._running: dict[str, asyncio.Task[None]] = {}
        self._launching = asyncio.Lock()
        self._jobs: list[str] = []

    def start(self, pending: Pending) -> None:
        """Begin to carry out an action; returns at once."""
        if pending.key in self._running:
            return
        task = asyncio.ensure_future(self._run(pending))
        self._running[pending.key] = task
        task.add_done_callback(lambda _: self._running.pop(pending.key, None))

    def drop_all_but(self, pending: Container[str]) -> None:
        """Give up the actions whose keys are not pending any more.

        An order that waits for a lost node must not reach it when it comes back: by then others
        have its ranks.
        """
        for key, task in self._running.items():
            if key not in pending:
                task.cancel()

    async def close(self) -> None:
        """Leave unfinished effects alone; the next supervisor takes them up from the journal."""
        tasks = tuple(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, pending: Pending) -> None:
        try:
            ok, detail = await self._carry_out(pending)
        except Exception as error:
            log.exception("%s failed", pending.key)
            ok, detail = False, f"{type(error).__name__}: {error}"
        self._context.emit(ev.ActionDone(key=pending.key, ok=ok, detail=detail))

    async def _carry_out(self, pending: Pending) -> tuple[bool, str]:
        match pending.action:
            case Launch() as wanted:
                return await self._launch(pending.key, wanted)
            case Unhold(job=job, exclude=exclude):
                return await self._unhold(job, exclude)
            case GiveBack(job=job):
                return await self._give_back(pending.key, job)
            case NoteNode() as incident:
                return await self._note(pending.at, incident)
            case StartRanks() as start:
                return await self._start_ranks(pending.key, start)
            case StopRanks() as stop:
                return await self._stop_ranks(pending.key, stop)
            case Commit() as wanted:
                return await self._commit(wanted)
            case Quarantine() as spoilt:
                assert self._store is not None, "nothing is restored from no store"
                return await put_in_quarantine(self._store, self._spec.name, spoilt)
            case Prune(places=places):
                assert self._store is not None, "nothing is committed to no store"
                return await prune(self._store, self._spec.name, places)
            case SetInterval() as change:
                order = Control(
                    attempt=change.attempt,
                    interval_steps=change.interval_steps,
                    effective_step=max(change.effective_step, self._context.step_ahead()),
                )
                return await self._order_all(pending.key, change.attempt, order)
            case Pair() as pair:
                return await self._pair(pending.key, pair)
            case Snapshot() as snapshot:
                step = max(snapshot.step, self._context.step_ahead())
                order = Control(attempt=snapshot.attempt, snapshot_step=step)
                ok, why = await self._order_all(pending.key, snapshot.attempt, order)
                return ok, why or f"at step {step}"
            case Finish():
                return await self._finish(pending.key)
            case _:
                return True, ""

    async def _launch(self, key: str, wanted: Launch) -> tuple[bool, str]:
        spec = replace(self._spec, key=key, nodes=wanted.nodes, exclude=wanted.exclude)

        async def submit() -> str:
            async with self._launching:
                if self._context.state().outcome is not None:
                    raise LaunchRefusedError("the run ends")
                self._jobs.append(await asyncio.to_thread(self._launcher.submit, spec))
            return self._jobs[-1]

        return await self._until_answered(submit)

    async def _unhold(self, job: str, exclude: Sequence[str]) -> tuple[bool, str]:
        async def unhold() -> str:
            await asyncio.to_thread(self._launcher.unhold, job, exclude)
            return job

        return await self._until_answered(unhold)

    async def _until_answered(self, ask: Callable[[], Awaitable[str]]) -> tuple[bool, str]:
        """Ask the launcher until it says yes or no: no answer is neither."""
        for tries in itertools.count():
            try:
                return True, await ask()
            except LaunchRefusedError as error:
                return False, str(error)
            except LaunchUnknownError as error:
                log.warning("no answer from the launcher, asking again: %s", error)
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(tries, 16)))
        raise AssertionError("asked for ever")

    async def _give_back(self, key: str, job: str) -> tuple[bool, str]:
        state = self._context.state()
        nodes = tuple(n.name for n in state.nodes.values() if n.alive and n.job == job)
        await self._shut_down(key, nodes)
        await asyncio.to_thread(self._launcher.cancel, job)
        return True, job

    async def _note(self, at: float, noted: NoteNode) -> tuple[bool, str]:
        entry = NodeIncident(
            at=at,
            node=noted.node,
            run=self._spec.name,
            incident=noted.incident,
            fault=noted.fault,
            cause=noted.cause,
            excluded_s=noted.excluded_s,
        )
        try:
            await asyncio.to_thread(self._ledger.note, entry)
        except LedgerUnavailable as error:
            log.warning("incident %d is not in the ledger: %s", noted.incident, error)
            return False, str(error)
        return True, ""

    async def _start_ranks(self, key: str, start: StartRanks) -> tuple[bool, str]:
        state = self._context.state()
        timeout_s = state.policy.start_timeout_s
        first = start.nodes[0]
        brought, why = await self._fetch(key, start, timeout_s)
        if not brought:
            return False, why
        port = await self._order(
            first, f"{key}/port", ReservePort(attempt=start.attempt), timeout_s
        )
        if not port.ok:
            return False, port.detail
        bodies = [
            StartNode(
                attempt=start.attempt,
                node_rank=node_rank,
                num_nodes=len(start.nodes),
                ranks=start.ranks_per_node,
                master_addr=state.nodes[first].address,
                master_port=int(port.detail),
                restore=start.restore,
                interval_steps=start.interval_steps,
            )
            for node_rank in range(len(start.nodes))
        ]
        # Rank 0 listens for the others; torch lets who comes too early sleep up to 0.75 s.
        head = await self._order(first, f"{key}/{first}", bodies[0], timeout_s)
        if not head.ok:
            return False, head.detail
        outcomes = await asyncio.gather(
            *(
                self._order(node, f"{key}/{node}", body, timeout_s)
                for node, body in zip(start.nodes[1:], bodies[1:], strict=True)
            )
        )
        return _all(outcomes)

    async def _fetch(self, key: str, start: StartRanks, timeout_s: float) -> tuple[bool, str]:
        """Have the nodes bring what their ranks lack; one that cannot tells of failed ranks."""
        state = self._context.state()
        wanted = fetch_orders(start, state.nodes, state.policy.fetch_timeout_s)
        return _all(
            await asyncio.gather(
                *(
                    self._order(node, f"{key}/fetch/{node}", body, timeout_s + body.timeout_s)
                    for node, body in wanted.items()
                )
            )
        )

    async def _pair(self, key: str, pair: Pair) -> tuple[bool, str]:
        return _all(
            await asyncio.gather(
                *(
                    self._order(node, f"{key}/{node}", Buddy(attempt=pair.attempt, address=at))
                    for node, at in pair.buddies.items()
                )
            )
        )

    async def _stop_ranks(self, key: str, stop: StopRanks) -> tuple[bool, str]:
        state = self._context.state()
        policy = state.policy
        known = state.attempt.max_step if state.attempt is not None else -1
        order = StopNode(
            attempt=stop.attempt,
            planned=stop.planned,
            stop_step=max(known + 2, self._context.step_ahead()),
            save_s=policy.stop_save_s,
            grace_s=policy.kill_grace_s,
        )
        return _all(
            await asyncio.gather(
                *(self._order(node, f"{key}/{node}", order) for node in stop.nodes)
            )
        )

    async def _order_all(self, key: str, attempt: int, body: OrderBody) -> tuple[bool, str]:
        current = self._context.state().attempt
        if current is None or current.number != attempt:
            return False, f"attempt {attempt} is over"
        return _all(
            await asyncio.gather(
                *(self._order(node, f"{key}/{node}", body) for node in current.nodes)
            )
        )

    async def _commit(self, wanted: Commit) -> tuple[bool, str]:
        shards = self._context.state().uploads.get((wanted.step, wanted.attempt))
        if not shards:
            return True, "settled before"
        assert self._store is not None, "nothing is uploaded without a store"
        records = [
            UploadRecord(rank=s.rank, index_key=s.index_key, index_crc64=s.index_crc64)
            for s in shards.values()
        ]
        world = next(iter(shards.values())).world
        cost = self._context.cost_of((wanted.step, wanted.attempt))
        name = self._spec.name
        write_id = f"{name}/{wanted.attempt}/commit/{wanted.step}"
        try:
            outcome = await asyncio.to_thread(
                commit,
                self._store,
                name,
                wanted.step,
                wanted.attempt,
                records,
                world=world,
                write_id=write_id,
                tokens=(cost.tokens or None) if cost is not None else None,
            )
        except CommitRefused as error:
            self._refuse(wanted, str(error))
            return False, str(error)
        except StoreError as error:
            return False, str(error)  # `rules.commit` says when to ask again
        if not outcome.committed:
            self._refuse(wanted, outcome.why)
            return False, outcome.why
        self._context.emit(
            ev.CheckpointCommitted(
                step=wanted.step,
                attempt=wanted.attempt,
                manifest_key=outcome.manifest_key,
                nbytes=outcome.nbytes,
                cost=cost,
            )
        )
        return True, outcome.manifest_key

    def _refuse(self, wanted: Commit, why: str) -> None:
        self._context.emit(ev.CommitRefused(step=wanted.step, attempt=wanted.attempt, why=why))

    async def _finish(self, key: str) -> tuple[bool, str]:
        async with self._launching:  # what is still being asked for is to be given back as well
            state = self._context.state()
        await self._shut_down(key, tuple(n.name for n in state.nodes.values() if n.alive))
        late = tuple(sorted(session.hello.node for session in self._sessions.all()))
        await self._shut_down(key, late)  # who came back from a long silence meanwhile
        living = [a.job for a in state.living_allocations if a.job]
        # Without a job as well: a submit that was given up may have come through.
        jobs = dict.fromkeys([*living, *self._jobs, ""])
        await asyncio.gather(*(asyncio.to_thread(self._launcher.cancel, job) for job in jobs))
        return True, ""

    async def _shut_down(self, key: str, nodes: tuple[str, ...]) -> None:
        """Have agents end and wait until they are gone, for a bounded time."""
        order = Shutdown(grace_s=self._context.state().policy.kill_grace_s)
        await asyncio.gather(*(self._order(node, f"{key}/{node}", order) for node in nodes))
        await self._sessions.all_gone(nodes, self._goodbye_s)

    async def _order(
        self, node: str, key: str, body: OrderBody, timeout_s: float = ORDER_TIMEOUT_S
    ) -> Outcome:
        epoch = self._context.state().epoch
        return await self._sessions.order(node, key, epoch, body, timeout_s)


def _all(outcomes: "list[Outcome]") -> tuple[bool, str]:
    bad = [outcome.detail for outcome in outcomes if not outcome.ok]
    return not bad, "; ".join(bad)
