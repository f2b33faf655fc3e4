import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from orchestrator.agent import connection
from orchestrator.agent.connection import Connection
from orchestrator.core.events import RanksGone
from orchestrator.wire import (
    Fact,
    Order,
    Outcome,
    Report,
    ReservePort,
    Welcome,
    pack,
    unpack_from_agent,
)
from tests.unit.orchestrator.desk import PATIENCE_S, Desk, greeting, until


def play(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def gone(attempt: int) -> RanksGone:
    return RanksGone(attempt=attempt, node="n0")


class Line:
    """A connection with an agent that only listens."""

    def __init__(self, run_dir: Path) -> None:
        self.welcomes: list[Welcome] = []
        self.orders: list[Order] = []
        self.connection = Connection(run_dir, greeting, self._welcomed, self._ordered)

    async def _welcomed(self, welcome: Welcome) -> None:
        self.welcomes.append(welcome)

    async def _ordered(self, order: Order) -> Outcome:
        self.orders.append(order)
        return Outcome(key=order.key, ok=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Connection]:
        task = asyncio.ensure_future(self.connection.run())
        try:
            yield self.connection
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=10)
            assert task.cancelled()


def test_facts_arrive_in_order_and_are_kept_until_they_are_on_disk(tmp_path: Path) -> None:
    async def main() -> None:
        line = Line(tmp_path)
        line.connection.fact(gone(1))
        async with Desk(tmp_path) as desk, line.running() as connection:
            connection.fact(gone(2))
            await until(lambda: len(desk.facts) == 2)
            assert [(fact.n, fact.event) for fact in desk.facts] == [(1, gone(1)), (2, gone(2))]
            assert connection.unsent == 2
            desk.sessions.ack("n0", "i1", 1)
            await until(lambda: connection.unsent == 1)
            desk.sessions.ack("n0", "i1", 2)
            await until(lambda: connection.unsent == 0)

    play(main())


def test_facts_without_an_ack_are_sent_again_to_the_next_supervisor(tmp_path: Path) -> None:
    async def main() -> None:
        line = Line(tmp_path)
        async with line.running() as connection:
            async with Desk(tmp_path) as first:
                for attempt in (1, 2, 3):
                    connection.fact(gone(attempt))
                await until(lambda: len(first.facts) == 3)
            connection.fact(gone(4))
            second = Desk(tmp_path)
            # The first one had got as far as 2 when it was killed; its acks were lost.
            second.welcome = Welcome(epoch=2, acked=2, attempt=0)
            async with second:
                await until(lambda: len(second.facts) == 2)
                await asyncio.sleep(0.05)
            assert [fact.n for fact in second.facts] == [3, 4]
            assert connection.unsent == 2
        assert [welcome.epoch for welcome in line.welcomes] == [1, 2]

    play(main())


def test_reports_are_not_kept(tmp_path: Path) -> None:
    async def main() -> None:
        line = Line(tmp_path)
        line.connection.report(Report(attempt=1, ranks=()))
        await asyncio.sleep(0)
        async with Desk(tmp_path) as desk, line.running() as connection:
            await until(lambda: line.welcomes)
            connection.report(Report(attempt=2, ranks=()))
            await until(lambda: desk.reports)
            assert [report.attempt for report in desk.reports] == [2]

    play(main())


@pytest.mark.parametrize("text", ["", "{", '{"url": "http://127.0.0.1:1"}', '{"url": 7}', "[]"])
def test_an_agent_waits_for_a_supervisor_that_is_not_there_yet(tmp_path: Path, text: str) -> None:
    async def main() -> None:
        line = Line(tmp_path)
        (tmp_path / "supervisor.json").write_text(text)
        (tmp_path / "token").write_text("x")
        async with line.running():
            await asyncio.sleep(0.3)
            (tmp_path / "token").unlink()
            async with Desk(tmp_path):
                await until(lambda: line.welcomes)

    play(main())


def test_an_agent_with_an_old_token_reads_the_new_one(tmp_path: Path) -> None:
    async def main() -> None:
        line = Line(tmp_path)
        async with Desk(tmp_path) as desk:
            (tmp_path / "token").write_text("an old one")
            async with line.running():
                await asyncio.sleep(0.2)
                assert not line.welcomes
                (tmp_path / "token").write_text(desk.token)
                await until(lambda: line.welcomes)

    play(main())


def test_an_order_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        line = Line(tmp_path)
        async with Desk(tmp_path) as desk, line.running():
            outcome = await desk.sessions.order("n0", "k", 3, ReservePort(attempt=1), 10.0)
            assert outcome.ok
            assert [order.key for order in line.orders] == ["k"]

    play(main())


def test_an_agent_can_introduce_itself_again(tmp_path: Path) -> None:
    async def main() -> None:
        line = Line(tmp_path)
        async with Desk(tmp_path) as desk, line.running() as connection:
            await until(lambda: line.welcomes)
            await connection.introduce_again()
            await until(lambda: len(desk.hellos) == 2)

    play(main())


def test_a_supervisor_that_has_nothing_to_say_is_not_gone(tmp_path: Path) -> None:
    """A script without heartbeats makes no facts, so nothing is acknowledged for days."""

    async def main() -> None:
        line = Line(tmp_path)
        async with Desk(tmp_path) as desk, line.running() as connection:
            await until(lambda: line.welcomes)
            await asyncio.sleep(0.3)
            assert connection.alone_s == 0.0
            await desk.server.stop()
            await until(lambda: connection.alone_s > 0.0)

    play(main())


def test_a_supervisor_that_does_not_say_goodbye_holds_nobody_up(tmp_path: Path) -> None:
    """Frozen, or on a node that is gone: the agent may have seconds left to leave."""

    async def greets_only(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        await socket.send_str(pack(Welcome(epoch=1, acked=0, attempt=0)))
        await never.wait()
        return socket

    never = asyncio.Event()

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.get("/agents", greets_only)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        (tmp_path / "supervisor.json").write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
        (tmp_path / "token").write_text("x")
        line = Line(tmp_path)
        task = asyncio.ensure_future(line.connection.run())
        await until(lambda: line.welcomes)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=10 * connection.CLOSE_S)
        assert done
        await runner.cleanup()

    play(main())


def test_settling_waits_for_the_last_ack_and_for_nobody_who_is_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        line = Line(tmp_path)
        line.connection.fact(gone(1))
        await line.connection.settle(PATIENCE_S)
        async with Desk(tmp_path) as desk, line.running() as connection:
            await until(lambda: line.welcomes)
            settled = asyncio.ensure_future(connection.settle(PATIENCE_S))
            await until(lambda: desk.facts)
            assert not settled.done()
            desk.sessions.ack("n0", "i1", 1)
            await settled
            connection.fact(gone(2))
            await until(lambda: len(desk.facts) == 2)
            await connection.settle(0.0)
            assert connection.unsent == 1

    play(main())


def test_agents_do_not_all_come_back_at_once() -> None:
    waits = {connection._wait_s(9) for _ in range(50)}
    assert len(waits) > 10
    assert max(waits) <= connection.RETRY_S[-1] <= 2 * min(waits)


class Socket:
    """A connection that notes what is sent."""

    closed = False

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send_str(self, text: str) -> None:
        self.sent.append(text)


def test_a_fact_that_a_lost_connection_held_up_is_not_overtaken_on_the_next(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        connection = Line(tmp_path).connection
        second = Socket()
        welcome = pack(Welcome(epoch=1, acked=0, attempt=0))

        class Lost(Socket):
            """Breaks in the middle of a fact; the next connection is there before that shows."""

            async def send_str(self, _: str) -> None:
                await connection._receive(cast(Any, second), welcome)
                raise ConnectionResetError

        for attempt in (1, 2, 3):
            connection.fact(gone(attempt))
        pump = asyncio.ensure_future(connection._pump())
        await connection._receive(cast(Any, Lost()), welcome)
        await until(lambda: len(second.sent) >= 3)
        pump.cancel()
        heard = [unpack_from_agent(text) for text in second.sent]
        assert [fact.n for fact in heard if isinstance(fact, Fact)] == [1, 2, 3]

    play(main())


class SlowSession:
    """A session whose connection comes at the moment that it is given up."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def ws_connect(self, *_: object, **__: object) -> Any:
        return await self.answer


class NeverEnding:
    """A connection on which nothing is ever said."""

    closed = False

    async def send_str(self, _: str) -> None:
        await asyncio.sleep(3600)

    async def close(self) -> None:
        self.closed = True


def test_a_connection_that_is_cancelled_as_it_comes_up_does_not_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "supervisor.json").write_text('{"url": "http://127.0.0.1:1"}')
        (tmp_path / "token").write_text("x")
        session: Any = SlowSession()
        task = asyncio.ensure_future(Line(tmp_path).connection._one_connection(session))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        session.answer.set_result(NeverEnding())
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=5)
        assert done
        assert task.cancelled()

    play(main())
