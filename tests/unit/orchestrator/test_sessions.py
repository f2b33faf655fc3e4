"""A real server on loopback, with agents that say what the test tells them."""

import asyncio
import socket
import stat
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from orchestrator.core.events import RanksGone
from orchestrator.errors import PreconditionError
from orchestrator.supervisor import sessions
from orchestrator.supervisor.sessions import read_or_make_token
from orchestrator.wire import Ack, Fact, Order, Outcome, Report, ReservePort, Welcome, pack
from tests.unit.orchestrator.desk import Desk, free_port, greeting, needs_ipv6, until

FACT = Fact(n=1, event=RanksGone(attempt=1, node="n0"))


def play(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def get(url: str, **more: Any) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.get(url, **more) as answer:
        return answer.status, await answer.read()


async def post(url: str, **more: Any) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url, **more) as answer:
        return answer.status, await answer.read()


BAD_TOKENS = ["", "x", "0" * 64, "\u00e9", "a b"]


@pytest.mark.parametrize("token", BAD_TOKENS)
def test_an_agent_with_a_wrong_token_is_refused(tmp_path: Path, token: str) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            status, body = await get(f"{desk.server.url}/agents", headers=desk.auth(token))
            assert (status, desk.token.encode() in body) == (401, False)
            assert not desk.hellos

    play(main())


@pytest.mark.parametrize("token", BAD_TOKENS)
def test_an_operator_with_a_wrong_token_is_refused(tmp_path: Path, token: str) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            url = f"{desk.server.url}/api/operator"
            status, _ = await post(url, headers=desk.auth(token), json={"say": "stop"})
            assert status == 401
            assert (await post(url, json={"say": "stop"}))[0] == 401
            assert desk.said == []

    play(main())


def test_a_header_that_is_no_text_is_a_wrong_token(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            port = int(desk.server.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"GET /agents HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
            )
            assert b" 401 " in await reader.readline()
            writer.close()
            await writer.wait_closed()

    play(main())


@pytest.mark.parametrize("what", ["stop", "snapshot"])
def test_an_operator_with_the_token_is_heard(tmp_path: Path, what: str) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            url = f"{desk.server.url}/api/operator"
            assert (await post(url, headers=desk.auth(), json={"say": what}))[0] == 200
            assert desk.said == [what]

    play(main())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"stop"', b'{"say": "fire"}', b'{"say": ["stop"]}', b"\xff"]
)
def test_an_operator_who_says_nothing_known_is_told_so(tmp_path: Path, body: bytes) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            url = f"{desk.server.url}/api/operator"
            assert (await post(url, headers=desk.auth(), data=body))[0] == 400
            assert desk.said == []

    play(main())


def test_health_is_what_the_loop_says(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            url = f"{desk.server.url}/healthz"
            assert (await get(url))[0] == 200
            desk.is_healthy = False
            assert (await get(url))[0] == 503

    play(main())


def test_the_pages_are_there_for_anybody_on_the_address(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            assert (await get(f"{desk.server.url}/"))[1] == b"<html>page</html>"
            assert b"running" in (await get(f"{desk.server.url}/api/status"))[1]
            assert (await get(f"{desk.server.url}/metrics"))[1] == b"everstep_step 1\n"

    play(main())


def test_a_taken_port_is_said_with_the_key_and_the_fix(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(
                PreconditionError, match=rf"server\.port: .*127\.0\.0\.1:{port}.*0 "
            ):
                await Desk(tmp_path, port).open()

    play(main())


@needs_ipv6
def test_an_address_may_be_one_of_ipv6(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path, host="::1") as desk, desk.agent():
            assert desk.server.url.startswith("http://[::1]:")

    play(main())


def test_a_port_can_be_taken_up_again_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        for _ in range(2):
            async with Desk(tmp_path, port) as desk, desk.agent():
                pass

    play(main())


def test_an_agent_is_welcomed_and_heard(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            desk.welcome = Welcome(epoch=4, acked=7, attempt=2)
            async with desk.agent("n3", attempt=2) as agent:
                assert agent.welcome == desk.welcome
                assert desk.hellos[0].attempt == 2
                await agent.says(FACT)
                await agent.says(Report(attempt=2, ranks=()))
                await until(lambda: desk.facts and desk.reports)
                assert desk.sessions.is_connected("n3")
                desk.sessions.ack("n3", "i1", 1)
                assert await agent.hears() == Ack(n=1)
                desk.sessions.ack("n3", "an earlier one", 9)
                desk.sessions.ack("nobody", "i1", 9)
            await until(lambda: desk.left)
            assert not desk.sessions.is_connected("n3")

    play(main())


@pytest.mark.parametrize("first", ["{", '{"is": "Ack", "n": 1}', '{"is": "Report"}', "x" * 1000])
def test_who_does_not_introduce_itself_is_sent_away(tmp_path: Path, first: str) -> None:
    async def main() -> None:
        async with (
            Desk(tmp_path) as desk,
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{desk.server.url}/agents", headers=desk.auth()) as line,
        ):
            await line.send_str(first)
            async with asyncio.timeout(10):
                assert (await line.receive()).type is not aiohttp.WSMsgType.TEXT
            assert not desk.hellos
            assert not desk.left

    play(main())


def test_who_says_nothing_at_all_is_sent_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "HELLO_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with (
            Desk(tmp_path) as desk,
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{desk.server.url}/agents", headers=desk.auth()) as line,
        ):
            async with asyncio.timeout(10):
                assert (await line.receive()).type is not aiohttp.WSMsgType.TEXT

    play(main())


def test_garbage_from_an_agent_ends_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk, desk.agent() as agent:
            for text in (
                "{",
                "[" * 100_000,
                '{"is": "Fact", "n": 1, "event": {"is": "LeaseTaken"}}',
            ):
                await agent.line.send_str(text)
            await agent.line.send_bytes(b"\x00")
            await agent.says(FACT)
            await until(lambda: desk.facts)
            assert len(desk.facts) == 1

    play(main())


ORDER = ReservePort(attempt=1)


def test_an_order_brings_its_outcome(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk, desk.agent() as agent:
            asked = asyncio.ensure_future(desk.sessions.order("n0", "k", 3, ORDER, 10.0))
            assert await agent.hears() == Order(key="k", epoch=3, body=ORDER)
            await agent.says(Outcome(key="another", ok=False))
            await agent.says(Outcome(key="k", ok=True, detail="29500"))
            assert await asked == Outcome(key="k", ok=True, detail="29500")
            await agent.says(Outcome(key="k", ok=False))  # once more: nobody is waiting

    play(main())


def test_an_order_is_sent_again_under_its_key_when_the_agent_is_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            asked = asyncio.ensure_future(desk.sessions.order("n0", "k", 3, ORDER, 20.0))
            for _ in range(2):
                async with desk.agent() as agent:
                    assert await agent.hears() == Order(key="k", epoch=3, body=ORDER)
            async with desk.agent() as agent:
                assert await agent.hears() == Order(key="k", epoch=3, body=ORDER)
                await agent.says(Outcome(key="k", ok=True))
                assert (await asked).ok

    play(main())


def test_an_order_moves_to_a_newer_connection_of_the_same_node(tmp_path: Path) -> None:
    """The old one may be half open: nobody is told that it is dead."""

    async def main() -> None:
        async with Desk(tmp_path) as desk, desk.agent() as old:
            patience_s = sessions.PING_S  # no ping has found out by then
            asked = asyncio.ensure_future(desk.sessions.order("n0", "k", 3, ORDER, patience_s))
            await old.hears()
            async with desk.agent(incarnation="i1") as new:
                assert await new.hears() == Order(key="k", epoch=3, body=ORDER)
                await new.says(Outcome(key="k", ok=True))
                assert (await asked).ok
                assert desk.sessions.is_connected("n0")

    play(main())


def test_an_order_to_nobody_is_given_up_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            outcome = await desk.sessions.order("n9", "k", 3, ORDER, 0.05)
            assert (outcome.ok, outcome.key) == (False, "k")
            assert "n9 did not answer" in outcome.detail

    play(main())


def test_an_order_without_an_answer_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk, desk.agent():
            outcome = await desk.sessions.order("n0", "k", 3, ORDER, 0.05)
            assert not outcome.ok
            assert not desk.sessions._sessions["n0"].waiting

    play(main())


def test_an_agent_that_is_gone_before_its_welcome_is_not_there(tmp_path: Path) -> None:
    """It was heard, so the loop must hear that it left."""

    async def main() -> None:
        async with Desk(tmp_path) as desk:
            line = GoneAtOnce()
            session = sessions.Session(greeting("n0"), cast(Any, line))
            with pytest.raises(ConnectionError):
                await desk.sessions._admit(session)
            desk.sessions._remove(session)
            assert [hello.node for hello in desk.left] == ["n0"]
            async with desk.agent("n0"):
                desk.sessions._remove(session)
                assert len(desk.left) == 1, "a later connection is there"

    play(main())


class GoneAtOnce:
    """A connection that ended before anything could be said."""

    async def send_str(self, _: str) -> None:
        raise ConnectionResetError


def deaf(session: sessions.Session) -> None:
    """Leave little room between this server and the agent, which reads nothing."""
    assert session.transport is not None
    line = session.transport.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def test_an_agent_that_reads_nothing_any_more_stops_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a cut cable: its window gets full and nobody closes anything."""
    monkeypatch.setattr(sessions, "SEND_S", 0.5)

    async def main() -> None:
        async with Desk(tmp_path) as desk, desk.agent("n0") as stuck, desk.agent("n1") as well:
            (session,) = [each for each in desk.sessions.all() if each.hello.node == "n0"]
            deaf(session)
            line = stuck.line._response.connection.transport
            line.pause_reading()
            n = waiting = 0
            while waiting < 100:
                n += 1
                desk.sessions.ack("n0", "i1", n)
                await asyncio.sleep(0)
                waiting = waiting + 1 if session._acked else 0
            for _ in range(100_000):  # more to say changes nothing
                desk.sessions.ack("n0", "i1", n + 1)
            asked = asyncio.ensure_future(desk.sessions.order("n0", "k", 3, ORDER, 30.0))
            desk.sessions.ack("n1", "i1", 1)
            assert await well.hears() == Ack(n=1)
            await until(lambda: not desk.sessions.is_connected("n0"))
            assert [hello.node for hello in desk.left] == ["n0"]
            async with desk.agent("n0") as again:
                assert await again.hears() == Order(key="k", epoch=3, body=ORDER)
                await again.says(Outcome(key="k", ok=True))
                assert (await asked).ok
            line.abort()

    play(main())


def test_only_the_latest_ack_and_the_orders_still_wanted_wait_for_an_agent(tmp_path: Path) -> None:
    async def main() -> None:
        session = sessions.Session(greeting("n0"), cast(Any, None))
        for n in (1, 2, 3):
            session.ack(n)
        orders = [
            asyncio.ensure_future(session.ask(Order(key=key, epoch=1, body=ORDER))) for key in "ab"
        ]
        await asyncio.sleep(0)
        orders[0].cancel()
        await asyncio.wait({orders[0]})
        texts = list(iter(session._next, ""))
        assert texts == [pack(Ack(n=3)), pack(Order(key="b", epoch=1, body=ORDER))]
        session.give_up()
        assert await orders[1] is None

    play(main())


def test_a_session_that_is_cut_is_gone_and_its_agent_may_come_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk, desk.agent("n0") as agent:
            (session,) = desk.sessions.all()
            assert session.welcome == desk.welcome
            session.cut()
            with pytest.raises((TypeError, ConnectionError)):
                await agent.hears()
            await until(lambda: desk.left)
            async with desk.agent("n0"):
                assert desk.sessions.is_connected("n0")

    play(main())


def test_an_agent_whose_place_is_taken_is_heard_and_gets_no_orders(tmp_path: Path) -> None:
    async def main() -> None:
        desk = Desk(tmp_path)
        desk.sessions._is_former = lambda hello: hello.incarnation == "old"
        async with desk, desk.agent("n0", incarnation="new") as agent:
            async with desk.agent("n0", incarnation="old") as former:
                assert former.welcome == desk.welcome
                asked = asyncio.ensure_future(desk.sessions.order("n0", "k", 3, ORDER, 10.0))
                assert await agent.hears() == Order(key="k", epoch=3, body=ORDER)
                await agent.says(Outcome(key="k", ok=True))
                assert (await asked).ok
            await former.line.close()
            assert desk.sessions.is_connected("n0")
            assert not desk.left

    play(main())


def test_waiting_for_agents_to_leave_ends_when_they_have_left_or_with_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with Desk(tmp_path) as desk:
            async with desk.agent("n0"):
                await desk.sessions.all_gone(("n0",), 0.05)
                waiting = asyncio.ensure_future(desk.sessions.all_gone(("n0", "n1"), 60.0))
            await asyncio.wait_for(waiting, 10)
            await desk.sessions.all_gone(("n0",), 60.0)

    play(main())


def test_a_token_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = read_or_make_token(path)
    assert len(token) == 64
    assert read_or_make_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in tmp_path.iterdir()] == ["token"]


def test_two_runs_have_two_tokens(tmp_path: Path) -> None:
    assert read_or_make_token(tmp_path / "a") != read_or_make_token(tmp_path / "b")


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_token_lets_nobody_in_and_is_made_again(tmp_path: Path, text: str) -> None:
    """What a supervisor leaves that died, or met a full disk, while it wrote the file."""
    path = tmp_path / "token"
    path.write_text(text)
    token = read_or_make_token(path)
    assert len(token) == 64
    assert path.read_text().strip() == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
