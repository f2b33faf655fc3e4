"""The node's Prometheus endpoint: a picture of ranks, host and GPUs, made at each scrape."""

import asyncio
import time

from aiohttp import web

from monitors.gpu.nvml import NvmlProbe
from monitors.gpu.readings import GpuReading
from monitors.host import read_host
from monitors.observations import Ok
from monitors.prometheus.exporter import CONTENT_TYPE, NodeExporter
from monitors.prometheus.snapshot import NodeSnapshot, RankSample
from orchestrator.agent.ranks import Ranks
from orchestrator.agent.replicas import Replicas


class AgentExporter:
    """Serves /metrics on a free port of the node's address.

    Attributes:
        replicas: Copies the node's snapshots; None where nobody does.
    """

    def __init__(self, run: str, node: str, ranks: Ranks) -> None:
        self._run = run
        self._node = node
        self._ranks = ranks
        self._nvml = NvmlProbe()
        self._gpus: tuple[GpuReading, ...] = ()
        self._asking = asyncio.Lock()  # the probe is one thread's at a time
        self._sources: dict[str, float] = {}
        self.replicas: Replicas | None = None
        self._exporter = NodeExporter(self._snapshot)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, host: str) -> None:
        """Listen on a free port."""
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0).start()
        address, port = self._runner.addresses[0][:2]
        self.url = f"http://{address}:{port}/metrics"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def read_gpus(self) -> tuple[GpuReading, ...]:
        """Ask NVML, in a thread: it may take long or never answer, and heartbeats must go on."""
        async with self._asking:
            self._gpus = await asyncio.to_thread(self._nvml.read)
        return self._gpus

    async def _metrics(self, _: web.Request) -> web.Response:
        await self.read_gpus()
        body = self._exporter.render()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    def _snapshot(self) -> NodeSnapshot:
        host = read_host()
        if isinstance(host, Ok):
            self._sources["host"] = host.at
        if any(isinstance(gpu.busy_ratio, Ok) for gpu in self._gpus):
            self._sources["nvml"] = time.time()
        reports = {report.rank: report for report in self._ranks.reports()}
        samples = []
        for rank in self._ranks.running:
            report = reports.get(rank.number)
            if report is None:
                samples.append(RankSample(rank=rank.number))
                continue
            self._sources["ranks"] = time.time()
            samples.append(
                RankSample(
                    rank=rank.number,
                    step=report.step if report.step >= 0 else None,
                    phase=report.phase,
                    heartbeat_age_s=report.phase_age_s,
                )
            )
        copies = self.replicas
        copied_at = copies.copied_at if copies is not None else {}
        self._sources.update({f"copy_{tier}": at for tier, at in copied_at.items()})
        return NodeSnapshot(
            run=self._run,
            node=self._node,
            attempt=self._ranks.attempt,
            ranks=tuple(samples),
            host=host,
            gpus=self._gpus,
            log_lines=self._ranks.lines,
            signature_matches=dict(self._ranks.signature_counts),
            copy_failures=dict(copies.failed) if copies is not None else {},
            sources=dict(self._sources),
        )
