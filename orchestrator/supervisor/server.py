"""The supervisor's HTTP server: agents, /metrics, /healthz, the status page, operator requests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from orchestrator.errors import PreconditionError
from orchestrator.supervisor.sessions import Sessions
from orchestrator.views.page import CONTENT_SECURITY_POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What the server shows, each made when it is asked for."""

    status: Callable[[], dict[str, Any]]
    page: Callable[[], str]
    metrics: Callable[[], bytes]
    healthy: Callable[[], bool]
    said: Callable[[str], None]


class Server:
    """Listens on the configured address; loopback unless the run's file says otherwise."""

    def __init__(self, host: str, port: int, sessions: Sessions, pages: Pages) -> None:
        self._host = host
        self._port = port
        self._sessions = sessions
        self._pages = pages
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen.

        Raises:
            PreconditionError: The port is taken or the address is not this machine's.
        """
        app = web.Application()
        app.add_routes(
            [
                web.get("/agents", self._sessions.serve),
                web.get("/", self._page),
                web.get("/api/status", self._status),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.post("/api/operator", self._operator),
            ]
        )
        app.on_shutdown.append(lambda _: self._sessions.close())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise PreconditionError(
                f"server.port: cannot listen on {self._host}:{self._port}: {error.strerror}; "
                "choose another port, or 0 for any free one"
            ) from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Close all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(
            text=self._pages.page(),
            content_type="text/html",
            headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY},
        )

    async def _status(self, _: web.Request) -> web.Response:
        return web.json_response(self._pages.status())

    async def _metrics(self, _: web.Request) -> web.Response:
        body = self._pages.metrics()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _healthz(self, _: web.Request) -> web.Response:
        ok = self._pages.healthy()
        return web.json_response({"healthy": ok}, status=200 if ok else 503)

    async def _operator(self, request: web.Request) -> web.Response:
        if not self._sessions.is_allowed(request):
            return web.json_response({"error": "wrong token"}, status=401)
        try:
            what = (await request.json()).get("say")
        except (ValueError, AttributeError):
            what = None
        if what not in ("stop", "snapshot"):
            return web.json_response({"error": "say stop or snapshot"}, status=400)
        self._pages.said(what)
        return web.json_response({"ok": True})
