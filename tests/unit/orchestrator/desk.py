"""The supervisor's end of the wire without a supervisor, and a run to go with it."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

from orchestrator.config import RunConfig, parse
from orchestrator.supervisor.server import Pages, Server
from orchestrator.supervisor.sessions import Sessions, read_or_make_token
from orchestrator.wire import (
    Fact,
    FromAgent,
    FromSupervisor,
    Hello,
    Report,
    Welcome,
    pack,
    unpack_from_supervisor,
)

PATIENCE_S = 30.0


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")


def run_config(folder: Path, command: list[str] | None = None, **tables: Any) -> RunConfig:
    """A run of one node whose files lie in `folder`, also those in memory."""
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    raw = {
        "run": {"name": "small", "dir": str(folder)},
        "job": {"command": command or ["true"], "workdir": str(folder), "preload": []},
        **tables,
    }
    raw["nodes"] = {"memory_dir": str(memory), **tables.get("nodes", {})}
    config = parse(raw, "the test")
    config.run_dir.mkdir(exist_ok=True)
    return config


class Desk:
    """A real server with real sessions; what agents say is kept in lists."""

    def __init__(self, run_dir: Path, port: int = 0, host: str = "127.0.0.1") -> None:
        self.run_dir = run_dir
        self.token = read_or_make_token(run_dir / "token")
        self.hellos: list[Hello] = []
        self.facts: list[Fact] = []
        self.reports: list[Report] = []
        self.left: list[Hello] = []
        self.said: list[str] = []
        self.is_healthy = True
        self.welcome = Welcome(epoch=1, acked=0, attempt=0)
        self.sessions = self.make_sessions()
        self.server = Server(
            host,
            port,
            self.sessions,
            Pages(
                status=lambda: {"phase": "running"},
                page=lambda: "<html>page</html>",
                metrics=lambda: b"everstep_step 1\n",
                healthy=lambda: self.is_healthy,
                said=self.said.append,
            ),
        )

    def make_sessions(self) -> Sessions:
        return Sessions(
            self.token,
            self._greet,
            lambda _, fact: self.facts.append(fact),
            lambda _, report: self.reports.append(report),
            self.left.append,
        )

    def _greet(self, hello: Hello) -> Welcome:
        self.hellos.append(hello)
        return self.welcome

    async def open(self) -> None:
        await self.server.start()
        where = json.dumps({"url": self.server.url})
        (self.run_dir / "supervisor.json").write_text(where)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()

    def auth(self, token: str | None = None) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token if token is None else token}"}

    @contextlib.asynccontextmanager
    async def agent(self, node: str = "n0", **hello: Any) -> AsyncIterator["ScriptedAgent"]:
        """Connect as an agent would, and be welcomed."""
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{self.server.url}/agents", headers=self.auth()) as line,
        ):
            agent = ScriptedAgent(line)
            await agent.says(greeting(node, **hello))
            agent.welcome = await agent.hears()
            yield agent


def greeting(node: str = "n0", **changes: Any) -> Hello:
    value: dict[str, Any] = {
        "node": node,
        "incarnation": "i1",
        "pid": 1,
        "address": "127.0.0.1",
        "metrics_url": "",
        "attempt": 0,
        "staged": (),
    }
    return Hello(**{**value, **changes})


class ScriptedAgent:
    """An agent that says exactly what a test tells it to."""

    welcome: FromSupervisor

    def __init__(self, line: aiohttp.ClientWebSocketResponse) -> None:
        self.line = line

    async def says(self, message: FromAgent) -> None:
        await self.line.send_str(pack(message))

    async def hears(self) -> FromSupervisor:
        async with asyncio.timeout(PATIENCE_S):
            return unpack_from_supervisor(await self.line.receive_str())


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - there is no event for most of them
            await asyncio.sleep(0.005)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
