"""The node's uploader process: what it reports becomes facts."""

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.agent.kept import KeptProcess
from orchestrator.core.events import ShardUploaded, UploadFailed
from orchestrator.core.saves import ShardCost

MOST_CODES, LONGEST_CODE = 16, 40


class Uploads(KeptProcess):
    """Owns the uploader; its reports become facts."""

    def __init__(
        self,
        node_dir: Path,
        store_json: str,
        run: str,
        fact: Callable[[ShardUploaded | UploadFailed], None],
    ) -> None:
        command = [
            sys.executable,
            "-m",
            "checkpointing.uploader",
            *("--dir", str(node_dir)),
            *("--store", store_json),
            *("--run", run),
            "--until-eof",
        ]
        super().__init__("uploader", command)
        self._fact = fact

    def heard(self, value: Any) -> None:
        """Turn a report into a fact."""
        self._fact(report_of(value))


def report_of(value: dict[str, object]) -> ShardUploaded | UploadFailed:
    """Turn one report line into an event; raises KeyError or TypeError for anything else."""

    def number(name: str) -> int:
        item = value[name]
        if not isinstance(item, int):
            raise TypeError(f"{name} is no integer")
        return item

    ids = {"attempt": number("attempt"), "step": number("step"), "rank": number("rank")}
    if value["event"] == "upload_failed":
        return UploadFailed(**ids, error=str(value["error"])[:500])
    if value["event"] != "uploaded":
        raise KeyError(str(value["event"]))
    return ShardUploaded(
        **ids,
        world=number("world"),
        index_key=str(value["index_key"]),
        index_crc64=number("index_crc64"),
        nbytes=number("nbytes"),
        # From the step boundary on: what a fault meanwhile would cost, not the transfer alone.
        upload_s=_seconds(value, "upload_s"),
        cost=_cost_of(value),
    )


def _cost_of(value: Mapping[str, object]) -> ShardCost:
    retries = value.get("retries") or {}
    if not isinstance(retries, dict):
        raise TypeError("retries is no object")
    counts = list(retries.items())[:MOST_CODES]
    return ShardCost(
        sent_nbytes=_count(value.get("sent_nbytes", 0), "sent_nbytes"),
        sent_s=_seconds(value, "sent_s"),
        retries={str(code)[:LONGEST_CODE]: _count(n, "retries") for code, n in counts},
        hedges=_count(value.get("hedges", 0), "hedges"),
        plane=str(value.get("plane", ""))[:LONGEST_CODE],
    )


def _seconds(value: Mapping[str, object], name: str) -> float:
    """Return seconds, nan where the uploader does not know them."""
    item = value.get(name)
    if item is None:
        return math.nan
    if isinstance(item, bool) or not isinstance(item, int | float) or not 0 <= item < math.inf:
        raise TypeError(f"{name} is no number of seconds")
    return float(item)


def _count(item: object, name: str) -> int:
    if type(item) is not int or item < 0:
        raise TypeError(f"{name} is no count")
    return item
