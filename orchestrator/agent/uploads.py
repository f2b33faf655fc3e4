"""The node's uploader process: what it reports becomes facts."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.agent.kept import KeptProcess
from orchestrator.core.events import ShardUploaded, UploadFailed


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
    staged_at = value["staged_at"]
    if not isinstance(staged_at, int | float):
        raise TypeError("staged_at is no number")
    return ShardUploaded(
        **ids,
        world=number("world"),
        index_key=str(value["index_key"]),
        index_crc64=number("index_crc64"),
        nbytes=number("nbytes"),
        # From the step boundary on: what a fault meanwhile would cost, not the transfer alone.
        upload_s=max(0.0, time.time() - staged_at),
    )
