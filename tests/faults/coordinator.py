"""Does what a coordinator does, one order a line, each in a process of its own that can be killed.

python -m tests.faults.coordinator: an order is {"store": ..., "do": name, ...}; answers are
{"pid": ...} when its process begins and {"code": exit status, "out": what it returned} at its end.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from checkpointing.commit import UploadRecord, commit
from checkpointing.deletion import delete_commit, finish_deletions
from checkpointing.quarantine import lift, quarantine
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from checkpointing.sweep import find_orphans, sweep

RUN = "run"


def _commit(store: ObjectStore, order: dict[str, Any]) -> object:
    uploads = [UploadRecord(**record) for record in order["uploads"]]
    world, write_id = len(uploads), order["write_id"]
    return asdict(commit(store, RUN, order["step"], order["attempt"], uploads, world, write_id))


def _sweep(store: ObjectStore, order: dict[str, Any]) -> object:
    later = time.time() + 3600.0
    return sweep(store, RUN, find_orphans(store, RUN, later, older_than_s=0.0))


ACTIONS: dict[str, Callable[[ObjectStore, dict[str, Any]], object]] = {
    "commit": _commit,
    "delete": lambda store, order: delete_commit(store, RUN, order["step"], order["attempt"]),
    "finish": lambda store, order: finish_deletions(store, RUN),
    "sweep": _sweep,
    "quarantine": lambda store, order: quarantine(
        store, RUN, order["step"], order["attempt"], why="test", who="test"
    ),
    "lift": lambda store, order: lift(store, RUN, order["step"], order["attempt"]),
}


def _carry_out(order: dict[str, Any], out: int) -> None:
    result = ACTIONS[order["do"]](open_store(StoreConfig.from_json(order["store"])), order)
    os.write(out, json.dumps(result).encode())


def main() -> None:
    for line in sys.stdin:
        order, (read, write) = json.loads(line), os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _carry_out(order, write)
                code = 0
            except Exception as error:  # noqa: BLE001 - the test reads it
                os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
            os._exit(code)
        os.close(write)
        print(json.dumps({"pid": pid}), flush=True)
        with os.fdopen(read, "rb") as file:
            said = file.read()
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"code": code, "out": json.loads(said or b"null")}), flush=True)


if __name__ == "__main__":
    main()
