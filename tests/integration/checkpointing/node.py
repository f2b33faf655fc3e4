"""One node without an agent: slots, arenas, ranks and an uploader, as real processes."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from checkpointing import slot
from checkpointing.commit import CommitOutcome, UploadRecord, commit
from checkpointing.slot import Control, SlotView
from checkpointing.store.base import ObjectStore, StoreConfig, open_store

WORLD = 2
WITH_TORCH = Path(__file__).with_name("trainee.py")
SMALL = Path(__file__).with_name("small_trainee.py")


class Uploader:
    """The real process, and what it says."""

    def __init__(self, folder: Path, config: StoreConfig, run: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "checkpointing.uploader"),
                *("--dir", str(folder), "--store", config.to_json(), "--run", run),
            ],
            stdout=subprocess.PIPE,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (event := json.loads(line)) != {"event": "alive"}:
                self._lines.put(event)
        self.process.stdout.close()

    def next_event(self, timeout_s: float = 60.0) -> dict[str, Any]:
        return self._lines.get(timeout=timeout_s)

    def uploaded(self, step: int) -> list[dict[str, Any]]:
        """Wait until every rank's upload of a step is reported."""
        events: dict[int, dict[str, Any]] = {}
        while len(events) < WORLD:
            event = self.next_event()
            if event["event"] == "uploaded" and event["step"] == step:
                events[event["rank"]] = event
        return list(events.values())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(20)
        self._reader.join(10)
        return code


class Node:
    """A node folder, its run and its store."""

    def __init__(self, folder: Path, config: StoreConfig, run: str = "tiny") -> None:
        self.folder = folder
        self.config = config
        self.run = run
        self.views: list[SlotView] = []

    def stored_files(self, suffix: str) -> list[Path]:
        return sorted(Path(urlsplit(self.config.url).path).rglob(f"*{suffix}"))

    @property
    def store(self) -> ObjectStore:
        return open_store(self.config)

    def arena(self, rank: int) -> Path:
        return self.folder / f"arena-{rank}"

    def uploader(self) -> Uploader:
        return Uploader(self.folder, self.config, self.run)

    def start(
        self,
        attempt: int,
        steps: int,
        control: Control,
        restore: Mapping[str, object] | None = None,
        extra: Mapping[str, str] | None = None,
        side: int = 64,
        script: Path = SMALL,
    ) -> list[subprocess.Popen[bytes]]:
        self.close()
        processes = []
        for rank in range(WORLD):
            path = self.folder / f"slot-{rank}"
            slot.create(path)
            view = SlotView(path)
            view.set_control(control)
            self.views.append(view)
            environment = {
                **os.environ,
                **(extra or {}),
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "OMP_NUM_THREADS": "1",
                "EVERSTEP_RUN": self.run,
                "EVERSTEP_ATTEMPT": str(attempt),
                "EVERSTEP_SLOT": str(path),
                "EVERSTEP_ARENA": str(self.arena(rank)),
                "EVERSTEP_STORE": self.config.to_json(),
                "EVERSTEP_RESTORE": json.dumps(restore),
                "EVERSTEP_STEP_TIMEOUT_S": "60",
            }
            command = [sys.executable, str(script), str(steps), str(side), str(self.folder)]
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
        return processes

    def train(self, *arguments: Any, **options: Any) -> list[tuple[int, str]]:
        """Run an attempt to its end; return exit code and standard error of every rank."""
        processes = self.start(*arguments, **options)
        try:
            errors = [process.communicate(timeout=60)[1].decode() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        return [(p.returncode, error) for p, error in zip(processes, errors, strict=True)]

    def results(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"rank-{r}.json").read_text()) for r in range(WORLD)]

    def commit(self, events: list[dict[str, Any]], write_id: str = "w") -> CommitOutcome:
        first = events[0]
        uploads = [
            UploadRecord(rank=e["rank"], index_key=e["index_key"], index_crc64=e["index_crc64"])
            for e in events
        ]
        return commit(
            self.store, self.run, first["step"], first["attempt"], uploads, WORLD, write_id
        )

    def close(self) -> None:
        for view in self.views:
            view.close()
        self.views.clear()
