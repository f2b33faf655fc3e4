"""A supervisor in this process, with a launcher without processes and agents made of words."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from checkpointing.errors import StoreUnavailable
from orchestrator.config import RunConfig
from orchestrator.core import events as ev
from orchestrator.core.actions import Outcome as RunOutcome
from orchestrator.core.ledger import NodeExcluded
from orchestrator.core.record import Record
from orchestrator.core.state import State
from orchestrator.errors import LeaseLost, PreconditionError
from orchestrator.ledger import FILE_NAME, Ledger
from orchestrator.supervisor import looks, loop
from orchestrator.supervisor.inbound import Inbound, strangers
from orchestrator.supervisor.journal import FileJournal, read_records
from orchestrator.supervisor.lease import Lease
from orchestrator.supervisor.loop import Supervisor
from orchestrator.supervisor.sessions import Session
from orchestrator.views.history import History
from orchestrator.views.replay import replay
from orchestrator.wire import (
    Ack,
    Fact,
    Hello,
    Order,
    Outcome,
    Report,
    ReservePort,
    Shutdown,
    StartNode,
    StopNode,
    Welcome,
    pack,
    unpack_from_supervisor,
)
from tests.contract.fake_launcher import FakeLauncher
from tests.unit.orchestrator.desk import PATIENCE_S, greeting, run_config, until


def play(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


class Office:
    """A run and its supervisors, one after the other."""

    def __init__(self, folder: Path, store: Any = None, **tables: Any) -> None:
        self.config: RunConfig = run_config(folder, **tables)
        self.launcher = FakeLauncher()
        self.store = store
        self.journal_path = self.config.run_dir / "journal.jsonl"
        self.supervisor: Supervisor

    def records(self) -> tuple[Record, ...]:
        return read_records(self.journal_path)

    def events(self, kind: type) -> list[Any]:
        return [record.event for record in self.records() if isinstance(record.event, kind)]

    def make(self) -> Supervisor:
        """Put the next supervisor together, with what the journal holds."""
        lease = Lease.take(self.config.run_dir / "lease")
        records = self.records() if self.journal_path.exists() else ()
        state, history = History.of(records)
        self.supervisor = Supervisor(
            self.config,
            state=state,
            history=history,
            journal=FileJournal(self.journal_path),
            lease=lease,
            launcher=self.launcher,
            store=self.store,
            token="secret",
        )
        self.lease = lease
        return self.supervisor

    @asynccontextmanager
    async def open(self) -> AsyncIterator["asyncio.Future[State]"]:
        """Have a supervisor in office; it is dismissed at the end unless the run is over."""
        supervisor = self.make()
        task = asyncio.ensure_future(supervisor.run())
        try:
            await until(lambda: supervisor.server.url or task.done())
            yield task
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=PATIENCE_S)
            assert task.done()
            self.lease.release()

    @property
    def state(self) -> State:
        return self.supervisor.state

    @asynccontextmanager
    async def agent(self, node: str = "node0", **hello: Any) -> AsyncIterator["Words"]:
        """Connect once there is an allocation: no agent runs before."""
        await until(lambda: self.launcher.allocations() > 0)
        headers = {"Authorization": "Bearer secret"}
        url = f"{self.supervisor.server.url}/agents"
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(url, headers=headers) as line,
        ):
            words = Words(line, node)
            await line.send_str(pack(greeting(node, **hello)))
            words.welcome = await words.hears(Welcome)
            yield words


class Words:
    """An agent that does nothing but says that it did."""

    welcome: Any

    def __init__(self, line: aiohttp.ClientWebSocketResponse, node: str) -> None:
        self.line = line
        self.node = node
        self.orders: list[Order] = []

    async def hears(self, kind: type) -> Any:
        """Wait for a message of a kind; orders on the way are carried out in words."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = unpack_from_supervisor(await self.line.receive_str())
                if isinstance(message, Order):
                    self.orders.append(message)
                    detail = "29500" if isinstance(message.body, ReservePort) else ""
                    await self.says(Outcome(key=message.key, ok=True, detail=detail))
                    if isinstance(message.body, kind):
                        return message.body
                elif isinstance(message, kind):
                    return message

    async def says(self, message: Any) -> None:
        await self.line.send_str(pack(message))

    async def tells(self, n: int, event: Any) -> None:
        await self.says(Fact(n=n, event=event))

    async def starts(self, n: int = 1) -> StartNode:
        order: StartNode = await self.hears(StartNode)
        ranks = tuple(range(order.ranks))
        await self.tells(
            n, ev.RanksStarted(attempt=order.attempt, node=self.node, ranks=ranks, pids=ranks)
        )
        return order


def ended(code: int = 0, attempt: int = 1, ours: bool = False) -> ev.RankExited:
    return ev.RankExited(attempt=attempt, node="node0", rank=0, code=code, ours=ours)


def test_a_run_from_the_launch_to_its_end(tmp_path: Path) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open() as task, office.agent() as agent:
            order = await agent.starts()
            assert (order.attempt, order.master_port, order.restore) == (1, 29_500, None)
            await agent.tells(2, ended())
            await agent.hears(Shutdown)
            await agent.line.close()
            state = await asyncio.wait_for(task, PATIENCE_S)
            assert state.outcome is RunOutcome.FINISHED

    play(main())
    assert office.launcher.allocations() == 1
    assert not replay(office.records()).differences


def test_a_fact_sent_again_after_a_lost_ack_counts_once(tmp_path: Path) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open():
            async with office.agent() as agent:
                await agent.starts(n=1)
                await until(lambda: office.events(ev.RanksStarted))
            async with office.agent(attempt=1) as agent:
                assert agent.welcome == Welcome(epoch=1, acked=1, attempt=1)
                again = ev.RanksStarted(attempt=1, node="node0", ranks=(0,), pids=(0,))
                await agent.tells(1, again)
                assert (await agent.hears(Ack)).n == 1
            assert len(office.events(ev.RanksStarted)) == 1

    play(main())


def test_a_fact_sent_again_to_the_next_supervisor_counts_once(tmp_path: Path) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open(), office.agent() as agent:
            await agent.starts(n=1)
            await until(lambda: office.events(ev.RanksStarted))
        async with office.open(), office.agent(attempt=1) as agent:
            assert agent.welcome == Welcome(epoch=2, acked=1, attempt=1)
            again = ev.RanksStarted(attempt=1, node="node0", ranks=(0,), pids=(0,))
            await agent.tells(1, again)
            assert (await agent.hears(Ack)).n == 1
        assert len(office.events(ev.RanksStarted)) == 1
        assert office.launcher.allocations() == 1

    play(main())


def test_a_new_incarnation_counts_from_one_again(tmp_path: Path) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open():
            async with office.agent() as agent:
                await agent.starts(n=1)
                await until(lambda: office.events(ev.RanksStarted))
            async with office.agent(incarnation="i2") as agent:
                assert agent.welcome.acked == 0

    play(main())


def test_no_fact_is_acknowledged_before_it_is_on_disk(tmp_path: Path) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open(), office.agent() as agent:
            await agent.starts(n=1)
            ack = await agent.hears(Ack)
            assert ack.n == 1
            assert office.events(ev.RanksStarted), "acknowledged and not written"

    play(main())


def test_an_order_that_a_dead_supervisor_left_open_is_given_again_under_its_key(
    tmp_path: Path,
) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open():
            async with office.agent() as agent:
                await agent.hears(ReservePort)
            await until(lambda: not office.supervisor.sessions.is_connected("node0"))
        async with office.open(), office.agent() as agent:
            await agent.starts()
            keys = [order.key for order in agent.orders]
            assert keys == ["small/0/start_ranks/1/port", "small/0/start_ranks/1/node0"]
            assert {order.epoch for order in agent.orders} == {2}
        decided = [e.decision.key for e in office.events(ev.DecisionMade)]
        assert decided.count("small/0/start_ranks/1") == 1

    play(main())


def test_an_order_to_start_that_was_overtaken_by_events_is_not_given_any_more(
    tmp_path: Path,
) -> None:
    """Its node got lost before it heard of it, and comes back when others have its ranks."""
    office = Office(tmp_path, nodes={"spares": 1})

    async def main() -> None:
        async with office.open():
            async with office.agent("node0") as agent:
                await agent.hears(ReservePort)
                await until(lambda: office.events(ev.DecisionMade))
            await until(lambda: not office.supervisor.sessions.is_connected("node0"))
            office.launcher.kill_node("node0")
            async with office.agent("node1") as spare:
                assert (await spare.starts()).attempt == 2
                async with office.agent("node0") as late:
                    await until(lambda: office.state.nodes["node0"].alive)
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(late.hears(StartNode), 0.5)

    play(main())


def test_a_killed_rank_stops_the_attempt_and_starts_the_next(tmp_path: Path) -> None:
    office = Office(tmp_path, nodes={"ranks_per_node": 2})

    async def main() -> None:
        async with office.open(), office.agent() as agent:
            await agent.starts(n=1)
            await agent.tells(2, ended(-9))
            stop = await agent.hears(StopNode)
            assert (stop.attempt, stop.planned) == (1, False)
            event = ev.RankExited(attempt=1, node="node0", rank=1, code=-15, ours=True)
            await agent.tells(3, event)
            order = await agent.hears(StartNode)
            assert order.attempt == 2
        (verdict,) = office.events(ev.FaultJudged)
        assert (verdict.fault, verdict.rank) == ("rank_killed", 0)
        assert not replay(office.records()).differences

    play(main())


def test_ranks_that_leave_with_zero_because_they_were_stopped_do_not_end_the_run(
    tmp_path: Path,
) -> None:
    """They handle SIGTERM; the fault that led to the stop needs its verdict all the same."""
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open(), office.agent() as agent:
            await agent.starts(n=1)
            late = ev.RankOverdue(attempt=1, node="node0", rank=0, phase="step", step=3, for_s=1.0)
            office.supervisor.emit(late)
            await agent.hears(StopNode)
            await agent.tells(2, ended(0))
            assert (await agent.hears(StartNode)).attempt == 2
        (verdict,) = office.events(ev.FaultJudged)
        assert verdict.fault == "hang"

    play(main())


def test_a_node_that_the_launcher_reports_gone_is_lost_without_waiting(tmp_path: Path) -> None:
    office = Office(tmp_path, nodes={"spares": 1})

    async def main() -> None:
        async with office.open():
            async with office.agent("node0") as agent:
                await agent.starts()
                await until(lambda: office.events(ev.RanksStarted))
            async with office.agent("node1") as spare:
                office.launcher.kill_node("node0")
                assert (await spare.hears(StartNode)).attempt == 2
        (lost,) = office.events(ev.AgentLost)
        assert (lost.node, lost.why) == ("node0", "its agent's process is gone")
        assert lost.silent_s < office.config.timeouts.agent_lost_s

    play(main())


def test_a_launcher_that_cannot_look_loses_nobody(tmp_path: Path) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open():
            async with office.agent() as agent:
                await agent.starts()
            office.launcher.problem = "squeue: timed out"
            office.launcher.kill_node("node0")
            await asyncio.sleep(3 * looks.OBSERVE_S)
            assert not office.events(ev.AgentLost)
            assert not office.events(ev.JobObserved)

    play(main())


def test_a_refused_allocation_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.launcher.refusal = "no such partition"

    async def main() -> None:
        async with office.open() as task:
            state = await asyncio.wait_for(task, PATIENCE_S)
            assert state.outcome is RunOutcome.FAILED
            assert "no such partition" in state.outcome_reason

    play(main())


def test_a_deposed_supervisor_stops_at_once_and_writes_nothing_more(tmp_path: Path) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open() as task, office.agent() as agent:
            await agent.starts()
            await until(lambda: office.state.attempt and office.state.attempt.started_nodes)
            await until(lambda: not office.state.pending)
            before = office.journal_path.read_bytes()
            epoch = office.config.run_dir / "lease" / "epoch-00000002.json"
            epoch.write_text("{}")
            office.supervisor.emit(ev.OperatorSaid(what="stop"))
            with pytest.raises(LeaseLost):
                await asyncio.wait_for(asyncio.shield(task), PATIENCE_S)
            assert office.journal_path.read_bytes() == before
            epoch.unlink()

    play(main())


def test_a_lease_that_cannot_be_renewed_for_a_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LEASE_S", 0.04)
    office = Office(tmp_path)
    tries: list[int] = []

    async def main() -> None:
        async with office.open() as task:
            write = office.lease._write

            def stale(text: str) -> None:
                tries.append(1)
                if len(tries) < 4:
                    raise OSError(116, "Stale file handle")
                write(text)

            monkeypatch.setattr(office.lease, "_write", stale)
            await until(lambda: len(tries) > 5 or task.done())
            assert not task.done()

    play(main())
    assert len(tries) > 5


class FullDisk:
    """A journal whose disk gets full after some appends."""

    def __init__(self, journal: Any, room: int) -> None:
        self._journal = journal
        self.room = room

    def append(self, records: Sequence[Record]) -> None:
        if self.room == 0:
            raise OSError(28, "No space left on device")
        self.room -= 1
        self._journal.append(records)

    def close(self) -> None:
        self._journal.close()


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_a_full_disk_ends_the_supervisor_and_leaves_the_rest_alone(
    tmp_path: Path, room: int
) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        supervisor = office.make()
        supervisor._journal = FullDisk(supervisor._journal, room)
        with pytest.raises(PreconditionError, match=r"cannot write the journal.*No space left"):
            await asyncio.wait_for(supervisor.run(), PATIENCE_S)
        office.lease.release()
        assert len(office.records()) == supervisor.state.seq
        async with office.open(), office.agent() as agent:
            await agent.starts()
        assert office.launcher.allocations() == 1

    play(main())


def test_a_supervisor_can_be_dismissed_at_the_moment_in_which_something_comes_in(
    tmp_path: Path,
) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open():
            supervisor = office.supervisor
            work = asyncio.ensure_future(supervisor._looks.observe())
            await asyncio.sleep(0)
            supervisor._gone(greeting())
            work.cancel()
            done, _ = await asyncio.wait({work}, timeout=5)
            assert done
            assert work.cancelled()

    play(main())


def test_the_main_loop_can_be_dismissed_at_the_moment_in_which_something_comes_in(
    tmp_path: Path,
) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        supervisor = office.make()
        supervisor._open()
        turn = asyncio.ensure_future(supervisor._turn([]))
        await asyncio.sleep(0)
        supervisor.emit(ev.OperatorSaid(what="snapshot"))
        turn.cancel()
        await asyncio.wait({turn}, timeout=5)
        assert turn.cancelled()
        await supervisor._turn([])
        assert office.events(ev.OperatorSaid), "what came in is not lost"
        await supervisor._executor.close()
        office.lease.release()

    play(main())


def test_a_supervisor_that_stood_still_loses_nobody(tmp_path: Path) -> None:
    office = Office(tmp_path, timeouts={"agent_lost_s": 6.0})

    async def main() -> None:
        async with office.open(), office.agent() as agent:
            await agent.starts()
            await until(lambda: office.events(ev.RanksStarted))
            loop_time = office.supervisor._last_tick
            # As if this process had been stopped for a minute: no task ran meanwhile.
            monotonic = time.monotonic
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop.time, "monotonic", lambda: monotonic() + 60.0)
                await until(lambda: office.supervisor._last_tick > loop_time + 50)
                await asyncio.sleep(0.2)
            assert not office.events(ev.AgentLost)

    play(main())


async def ends(line: aiohttp.ClientWebSocketResponse) -> None:
    """Wait until the other side has ended the connection."""
    async with asyncio.timeout(PATIENCE_S):
        while (await line.receive()).type is aiohttp.WSMsgType.TEXT:
            pass


def lost(node: str = "node0") -> ev.AgentLost:
    return ev.AgentLost(node=node, incarnation="i1", why="silent for 3.0 s", silent_s=3.0)


def test_an_agent_that_was_given_up_while_it_said_hello_has_to_say_it_again(
    tmp_path: Path,
) -> None:
    """It was told to keep ranks of an attempt that goes on without it."""
    office = Office(tmp_path, nodes={"spares": 1})

    async def main() -> None:
        async with office.open():
            async with office.agent("node0") as agent:
                await agent.starts()
                await until(lambda: office.events(ev.RanksStarted))
            greet = office.supervisor.sessions._greet

            def late(hello: Hello) -> Welcome:
                office.supervisor.emit(lost())
                return greet(hello)

            office.supervisor.sessions._greet = late
            async with office.agent("node0", attempt=1) as agent:
                office.supervisor.sessions._greet = greet
                assert agent.welcome.attempt == 1
                await ends(agent.line)
            async with office.agent("node0", attempt=1) as agent:
                assert agent.welcome.attempt == 0, "its ranks are to end"
            async with office.agent("node0") as agent:
                await until(lambda: office.state.nodes["node0"].alive)
        assert not replay(office.records()).differences

    play(main())


def test_a_connected_agent_that_was_given_up_has_to_say_hello_again(tmp_path: Path) -> None:
    office = Office(tmp_path, nodes={"count": 2})

    async def main() -> None:
        async with office.open():
            async with office.agent("node0") as agent:
                await until(lambda: "node0" in office.state.nodes)
                office.supervisor.emit(lost())
                await ends(agent.line)
            async with office.agent("node0"):
                await until(lambda: office.state.nodes["node0"].alive)

    play(main())


@pytest.mark.parametrize(
    ("hello", "welcome", "event", "after_s", "is_cut"),
    [
        (1, 0, ev.AgentJoined, 0.0, False),  # it ends its ranks and comes again by itself
        (1, 0, ev.AgentJoined, 60.0, True),
        (1, 2, ev.AgentJoined, 0.0, True),
        (1, 0, ev.AgentLost, 0.0, True),
        (1, 0, None, 0.0, False),
    ],
)
def test_only_an_agent_that_was_told_something_wrong_is_cut_off(
    hello: int, welcome: int, event: Any, after_s: float, is_cut: bool
) -> None:
    session = Session(greeting("n0", attempt=hello), cast(Any, None))
    session.welcome = Welcome(epoch=1, acked=0, attempt=welcome)
    session.since = 100.0
    joined = ev.AgentJoined(node="n0", incarnation="i1", address="", metrics_url="")
    news = {ev.AgentJoined: joined, ev.AgentLost: lost("n0")}
    batch = [Inbound(news[event])] if event else []
    found = list(strangers(State(), [session], batch, 100.0 + after_s))
    assert found == ([session] if is_cut else [])


def test_an_agent_whose_place_was_taken_is_told_to_end_its_ranks_and_not_counted(
    tmp_path: Path,
) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open(), office.agent() as agent:
            await agent.starts()
            async with office.agent(incarnation="i2"):
                await until(lambda: office.state.nodes["node0"].incarnation == "i2")
                joined = len(office.events(ev.AgentJoined))
                async with office.agent(attempt=1) as former:
                    assert former.welcome == Welcome(epoch=1, acked=0, attempt=0)
                    await former.tells(9, ended())
                    await former.says(Report(attempt=1, ranks=()))
                    await asyncio.sleep(0.2)
                assert len(office.events(ev.AgentJoined)) == joined
                assert not office.events(ev.RankExited)

    play(main())


def test_an_agent_whose_port_refuses_is_lost_without_waiting(tmp_path: Path) -> None:
    """The launcher may still list its node: the machine lives, the agent was killed."""
    office = Office(tmp_path)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as port:
            url = f"http://127.0.0.1:{port.getsockname()[1]}/metrics"
            async with office.open():
                async with office.agent("node0", metrics_url=url):
                    await until(lambda: office.supervisor.watch._liveness._ports._reached)
                    port.close()
                await until(lambda: office.events(ev.AgentLost))
        (gone,) = office.events(ev.AgentLost)
        assert (gone.node, "process is gone" in gone.why) == ("node0", True)
        assert gone.silent_s < office.config.timeouts.agent_lost_s / 2

    play(main())


def test_a_silent_agent_whose_machine_answers_is_waited_for(tmp_path: Path) -> None:
    times = {"heartbeat_s": 0.1, "agent_lost_s": 2.5}
    office = Office(tmp_path, timeouts=times)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as port:
            url = f"http://127.0.0.1:{port.getsockname()[1]}/metrics"
            async with office.open(), office.agent(metrics_url=url) as agent:
                await agent.starts()
                await until(lambda: office.events(ev.AgentLost))
        (gone,) = office.events(ev.AgentLost)
        assert gone.silent_s >= times["agent_lost_s"]
        assert "though its machine answers" in gone.why

    play(main())


def test_a_supervisor_that_hears_nobody_and_no_launcher_blames_nobody(tmp_path: Path) -> None:
    times = {"heartbeat_s": 0.1, "agent_lost_s": 0.6}
    office = Office(tmp_path, timeouts=times)

    async def main() -> None:
        async with office.open(), office.agent() as agent:
            await agent.starts()
            await until(lambda: office.supervisor.state.allocations[0].job)
            office.launcher.problem = "no route to host"
            await until(lambda: office.supervisor._kept_back)
            await asyncio.sleep(0.5)
            assert not office.events(ev.AgentLost)
            office.launcher.problem = ""
            await until(lambda: office.events(ev.AgentLost))
        (gone,) = office.events(ev.AgentLost)
        assert gone.silent_s >= 1.1

    play(main())


def test_agents_that_are_silent_after_their_allocation_ended_are_lost(tmp_path: Path) -> None:
    """The launcher has said all it will say of it, so that no further answer is waited for."""
    office = Office(tmp_path, timeouts={"heartbeat_s": 0.1, "agent_lost_s": 0.6})

    async def main() -> None:
        async with office.open(), office.agent() as agent:
            await agent.starts()
            office.launcher.ended["fake-1"] = ev.Ending.FAILED
            await until(lambda: office.events(ev.JobObserved))
            await until(lambda: office.events(ev.AgentLost))

    play(main())


def test_the_ledger_is_read_before_the_first_decision(tmp_path: Path) -> None:
    office = Office(tmp_path)
    entry = NodeExcluded(at=time.time(), node="node9", by="alice", why="noises")
    Ledger(office.config.run_dir / FILE_NAME).note(entry)

    async def main() -> None:
        async with office.open():
            await until(lambda: office.events(ev.DecisionMade))
        kinds = [type(record.event) for record in office.records()]
        assert kinds.index(ev.LedgerRead) < kinds.index(ev.DecisionMade)
        action = office.events(ev.DecisionMade)[0].decision.action
        assert action.exclude == ("node9",)

    play(main())


def test_time_goes_on_when_the_clock_was_an_hour_ahead_for_a_moment(tmp_path: Path) -> None:
    office = Office(tmp_path)
    supervisor = office.make()
    real, wall, monotonic = time.time(), time.time, time.monotonic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: wall() + 3600.0)
        supervisor._append([Inbound(ev.OperatorSaid(what="snapshot"))])
        patch.setattr(time, "time", wall)
        assert supervisor.state.at > real + 3500.0
        patch.setattr(time, "monotonic", lambda: monotonic() + 20.0)
        assert supervisor._now() >= supervisor.state.at + 20.0
    office.lease.release()


def test_a_terminal_that_is_gone_does_not_end_the_supervisor(tmp_path: Path) -> None:
    office = Office(tmp_path)
    shown: list[State] = []

    def show(state: State, *_: object) -> None:
        shown.append(state)
        raise BrokenPipeError(32, "Broken pipe")

    async def main() -> None:
        async with office.open() as task, office.agent() as agent:
            office.supervisor._watcher = show
            await agent.starts()
            await until(lambda: office.events(ev.RanksStarted))
            assert not task.done()
            assert len(shown) == 1

    play(main())


class Shelf:
    """A store that does not answer at first."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def list(self, _: str) -> tuple[()]:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("s3://b: no answer")
        return ()


def test_a_store_that_cannot_be_listed_is_not_an_empty_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "CATALOGUE_RETRY_S", 0.05)
    office = Office(tmp_path, store=Shelf(failures=3), checkpoint={"store": "file:///b"})

    async def main() -> None:
        async with office.open(), office.agent() as agent:
            await agent.starts()
        told = [type(e).__name__ for e in (record.event for record in office.records())]
        assert told.count("CatalogueUnknown") == 1, "the same problem is told once"
        assert told.index("CatalogueUnknown") < told.index("CatalogueRead")
        assert told.index("CatalogueRead") < told.index("RanksStarted")

    play(main())


def test_where_the_supervisor_is_can_be_read(tmp_path: Path) -> None:
    office = Office(tmp_path)

    async def main() -> None:
        async with office.open():
            path = office.config.run_dir / "supervisor.json"
            await until(path.exists)
            where = json.loads(path.read_text())
            assert where["url"] == office.supervisor.server.url
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{where['url']}/healthz") as healthz,
                session.get(f"{where['url']}/api/status") as status,
                session.get(f"{where['url']}/metrics") as metrics,
                session.get(f"{where['url']}/") as page,
            ):
                assert [a.status for a in (healthz, status, metrics, page)] == [200] * 4
                assert "small" in await page.text()
                assert (await status.json())["run"]

    play(main())
