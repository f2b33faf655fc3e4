"""Reads the agents' exporters back: what Prometheus would see of each node, for the status page."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from monitors.observations import NotMeasured, Observation, Ok, Unknown
from monitors.prometheus.reader import NodeReading, fetch
from orchestrator.core.state import State

EVERY_S = 5.0
STALE_S = 3 * EVERY_S
THREADS = 8


class Scraper:
    """Keeps the latest reading of each node with its age."""

    def __init__(self) -> None:
        self._readings: dict[str, Observation[tuple[NodeReading, ...]]] = {}
        # Of its own: nodes that do not answer must not keep a commit waiting for a thread.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="scrape")

    def close(self) -> None:
        """Ask no more; what is asked now ends by its own timeout."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def once(self, state: State) -> None:
        """Ask every living node once, all at the same time."""
        urls = {n.name: n.metrics_url for n in state.nodes.values() if n.alive and n.metrics_url}
        run = asyncio.get_running_loop().run_in_executor
        answers = await asyncio.gather(
            *(
                run(self._threads, partial(fetch, url, timeout_s=EVERY_S / 2))
                for url in urls.values()
            )
        )
        self._readings = dict(zip(urls, answers, strict=True))

    def of(self, node: str) -> dict[str, Any]:
        """Return what is known of a node: values, or the word for why there are none."""
        answer = self._readings.get(node)
        if answer is None:
            return {"state": "not_measured", "why": "not asked yet"}
        if isinstance(answer, Unknown | NotMeasured):
            return {"state": "unknown", "why": answer.why}
        if time.time() - answer.at > STALE_S:
            return {"state": "unknown", "why": f"last answer {time.time() - answer.at:.0f} s ago"}
        reading = next((r for r in answer.value if r.node in (node, "")), None)
        if reading is None:
            return {"state": "unknown", "why": "the exporter does not name this node"}
        host = reading.host
        return {
            "state": "ok",
            "load1": host.value.load1 if isinstance(host, Ok) else None,
            "memory_available_bytes": (
                host.value.memory_available_bytes if isinstance(host, Ok) else None
            ),
            "gpus": [
                {
                    "index": gpu.index,
                    "busy_ratio": _value(gpu.busy_ratio),
                    "memory_used_bytes": _value(gpu.memory_used_bytes),
                    "power_watts": _value(gpu.power_watts),
                }
                for gpu in reading.gpus
            ],
        }


def _value(observation: Observation[float]) -> float | None:
    return observation.value if isinstance(observation, Ok) else None
