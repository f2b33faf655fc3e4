"""A supervisor that is killed at one append to its journal.

python -m tests.integration.crashing_supervisor RUN_TOML N before|after|torn

It is everything that `everstep run` is, but for its journal: at the N-th append that journal ends
its own process with SIGKILL, before the batch reaches the file, after it is on disk, or when all
but its last bytes are. With N = 0 it lives, and prints the names of the events of each append.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from orchestrator.app import compose, prepare, serve
from orchestrator.config import freeze, load
from orchestrator.core.events import DecisionMade
from orchestrator.core.record import Record
from orchestrator.preflight import preflight
from orchestrator.supervisor.journal import FileJournal
from orchestrator.supervisor.lease import Lease

When = Literal["before", "after", "torn"]
TORN_BYTES = 5


class DeadlyJournal:
    """A journal that kills its writer at one append."""

    def __init__(self, path: Path, deadly: int, when: When) -> None:
        self._path = path
        self._journal = FileJournal(path)
        self._deadly = deadly
        self._when = when
        self.appends: list[list[str]] = []

    def append(self, records: Sequence[Record]) -> None:
        self.appends.append([_name(record) for record in records])
        is_deadly = len(self.appends) == self._deadly
        if is_deadly and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self._journal.append(records)
        if is_deadly and self._when == "torn":
            os.truncate(self._path, self._path.stat().st_size - TORN_BYTES)
        if is_deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self._journal.close()


def _name(record: Record) -> str:
    event = record.event
    if isinstance(event, DecisionMade):
        return f"decision {type(event.decision.action).__name__}"
    return type(event).__name__


def main() -> None:
    config = load(Path(sys.argv[1]))
    store = preflight(config)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    lease = Lease.take(config.run_dir / "lease")
    state, history = prepare(config)
    freeze(config, config.run_dir / "run.json")
    path = config.run_dir / "journal.jsonl"
    journal = DeadlyJournal(path, int(sys.argv[2]), cast(When, sys.argv[3]))
    serve(compose(config, state, history, journal, lease, store))
    lease.release()
    print(json.dumps(journal.appends))


if __name__ == "__main__":
    main()
