"""`python -m checkpointing.uploader --dir NODE_DIR --store JSON --run NAME`.

One JSON object per line on standard output tells what was uploaded. Ends with 0 on SIGTERM or when
its parent is gone, after the uploads in flight had their time; with 1 when another uploader holds
the folder, with 2 on wrong arguments.

With `--until-eof` it ends when its standard input does, and SIGTERM is ignored: a scheduler sends
that to all processes of a node when its time is over, before the last snapshot is even staged.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

from checkpointing.companion import emit, fail, lock_for_one, positive, until_eof
from checkpointing.errors import StoreError
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from checkpointing.store.budget import Budget
from checkpointing.store.pace import Pacer
from checkpointing.store.ration import FILE, Ration
from checkpointing.uploader.watch import Watcher

_WHO: Final = "uploader"
_POLL_S: Final = 0.03
_ALIVE_S: Final = 5.0
_DRAIN_S: Final = 10.0


def main() -> int:
    """Run until told to stop."""
    options = _options()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=f"{_WHO}: %(message)s")
    parent = os.getppid()
    stop = threading.Event()
    if options.until_eof:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=until_eof, args=(stop,), daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C of the terminal is for the agent
    if not options.dir.is_dir():
        return fail(_WHO, 2, f"--dir: {options.dir} is no folder")
    try:
        config = StoreConfig.from_json(options.store)
        most = options.max_bytes_per_s or config.max_bytes_per_s
        # One budget for all ranks, and what else of the node sends under its limit.
        ration = Ration(options.dir / FILE, most) if most else None
        store = open_store(config, Pacer(Budget(max_bytes_per_s=most), ration=ration))
    except (ValueError, StoreError) as error:
        return fail(_WHO, 2, f"--store: {error}")
    lock = lock_for_one(options.dir / "uploader.lock", stop)
    if lock is None:
        return 0 if stop.is_set() else fail(_WHO, 1, f"another uploader works on {options.dir}")
    watcher = _watch(options.dir, store, options.run, stop, parent)
    deadline = time.monotonic() + _DRAIN_S
    while watcher.busy and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return 0


def _watch(
    folder: Path, store: ObjectStore, run: str, stop: threading.Event, parent: int
) -> Watcher:
    watcher = Watcher(folder, store, run, emit)
    next_sign = 0.0
    while not stop.is_set() and watcher.heard and os.getppid() == parent:
        if time.monotonic() >= next_sign:
            next_sign = time.monotonic() + _ALIVE_S
            emit({"event": "alive"})  # whoever started it may end one that hangs
        watcher.poll()
        stop.wait(_POLL_S)
    return watcher


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="checkpointing.uploader", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="folder with the files arena-*")
    parser.add_argument("--store", required=True, help="StoreConfig as JSON")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument(
        "--max-bytes-per-s",
        type=positive,
        help="send no faster, whatever the store takes and its configuration allows",
    )
    parser.add_argument(
        "--until-eof", action="store_true", help="ignore SIGTERM; end when standard input ends"
    )
    return parser.parse_args()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that are still uploading would keep the interpreter alive
