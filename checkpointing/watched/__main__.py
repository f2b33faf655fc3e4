"""`python -m checkpointing.watched --dir DIR --pattern 'checkpoint-*' --store URL --name NAME`.

Keeps the checkpoint folders that a trainer writes into DIR: every finished one is uploaded,
verified and committed, then deleted if asked to. One JSON object per line on standard output tells
what was done. Further verbs: `ls` lists what is kept, `restore [ENTRY]` brings one back into DIR.

Ends with 0 on SIGTERM, or with `--until-eof` at the end of standard input, after what is finished
was committed; with 1 when `--drain-s` was over before or the store could not be used, with 2 on
wrong arguments.
"""

import argparse
import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Final

from checkpointing.companion import emit, fail, positive, until_eof
from checkpointing.errors import CheckpointingError, StoreError
from checkpointing.store.base import ObjectStore, StoreConfig, check_key, open_store
from checkpointing.store.budget import Budget
from checkpointing.store.pace import Pacer
from checkpointing.store.ration import Ration
from checkpointing.watched import verbs
from checkpointing.watched.disk import Finished
from checkpointing.watched.places import conflict, folder_of
from checkpointing.watched.rules import Rules
from checkpointing.watched.watching import Watching

_WHO: Final = "watched"
_ALIVE_S: Final = 5.0
_LOOK_S: Final = 0.1


def main() -> int:
    """Run one verb."""
    options = _options()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=f"{_WHO}: %(message)s")
    try:
        store = _store(options)
        if options.verb == "ls":
            found = verbs.rows(store, options.name)
            _print(json.dumps(found) if options.json else verbs.table(found))
            return 0
        if options.verb == "restore":
            return _restore(store, options)
        return _watch(store, _rules(options), options)
    except ValueError as error:
        return fail(_WHO, 2, _line(error))
    except (CheckpointingError, OSError) as error:
        return fail(_WHO, 1, _line(error))


def _restore(store: ObjectStore, options: argparse.Namespace) -> int:
    if options.dir is None:
        raise ValueError("restore needs --dir")
    path = verbs.restore(store, options.name, options.dir, entry=options.entry, node=options.node)
    if path is None:
        sys.stderr.write(f"{_WHO}: nothing is kept yet\n")
    else:
        _print(str(path))
    return 0


def _watch(store: ObjectStore, rules: Rules, options: argparse.Namespace) -> int:
    stop, over, parent = threading.Event(), threading.Event(), os.getppid()
    if options.until_eof:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=until_eof, args=(stop,), daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, lambda *_: (over if stop.is_set() else stop).set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C of the terminal is for the agent
    threading.Thread(target=_say_alive, args=(over,), daemon=True).start()
    limit = (stop, over, options.drain_s)
    threading.Thread(target=_end_after, args=limit, daemon=True).start()
    watching = Watching(rules, store, emit, over.is_set)
    while not (options.once or stop.is_set() or over.is_set()):
        watching.poll()
        stop.wait(options.poll_s)
        if os.getppid() != parent:
            return 0  # whoever started it is gone; the folders stay, and a successor goes on
    stop.set()
    watching.hurry()
    watching.poll()
    while not watching.done and not over.is_set():
        over.wait(min(_LOOK_S, options.poll_s))
        watching.poll()
    if not watching.done:
        left = ", ".join(watching.pending) or "the directory was not looked at"
        return fail(_WHO, 1, f"out of time: {left}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="checkpointing.watched",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("verb", nargs="?", choices=("watch", "ls", "restore"), default="watch")
    add("entry", nargs="?", help="of restore: which one; the newest unless given")
    add("--dir", type=Path, help="where the trainer writes its checkpoints")
    known = os.environ  # a rank of everstep need not be told where its run keeps things
    add(
        "--store",
        default=known.get("EVERSTEP_STORE"),
        help="s3://bucket/prefix, file:///folder, or StoreConfig as JSON",
    )
    add("--endpoint-url", help="of another S3 server than AWS's")
    add("--region")
    add("--name", default=known.get("EVERSTEP_RUN"), help="what they are kept under in the store")
    add("--pattern", help="names of the checkpoints, as 'checkpoint-*'")
    add("--finished", choices=("quiet", "marker", "rename"), default="quiet")
    add("--marker", default="", help="of --finished marker: path of the file in the folder")
    add("--quiet-s", type=positive, default=60.0, help="of --finished quiet")
    add("--delete", action="store_true", help="delete what was committed")
    add("--keep", type=int, default=1, help="but never the newest so many")
    add("--shared", action="store_true", help="all nodes see the same directory")
    node = known.get("EVERSTEP_NODE") or socket.gethostname()
    add("--node", default=node, help="name of this node")
    add("--nodes", type=int, default=1, help="nodes that write their own parts of each folder")
    add("--attempts", type=Path, help="file with the attempts of the run, from whoever starts them")
    add("--max-bytes-per-s", type=positive, help="send no faster")
    add("--budget", type=Path, help="file that shares this limit with others of the node")
    add("--poll-s", type=positive, default=2.0)
    add("--drain-s", type=positive, default=600.0, help="time for the last ones at the end")
    add("--once", action="store_true", help="leave when all that is finished was committed")
    add("--until-eof", action="store_true", help="ignore SIGTERM; end when standard input ends")
    add("--json", action="store_true", help="of ls: one JSON array")
    return parser.parse_intermixed_args()  # the entry may come after the options


def _store(options: argparse.Namespace) -> ObjectStore:
    if not options.store or not options.name:
        raise ValueError("say --store and --name")
    config = _config(options)
    most = options.max_bytes_per_s or config.max_bytes_per_s
    try:
        check_key(options.name)
        ration = Ration(options.budget, most) if options.budget and most else None
        return open_store(config, Pacer(Budget(max_bytes_per_s=most), ration=ration))
    except StoreError as error:
        raise ValueError(str(error)) from error


def _config(options: argparse.Namespace) -> StoreConfig:
    if options.store.startswith("{"):
        return StoreConfig.from_json(options.store)
    return StoreConfig(url=options.store, endpoint_url=options.endpoint_url, region=options.region)


def _rules(options: argparse.Namespace) -> Rules:
    if options.dir is None or not options.pattern:
        raise ValueError("watching needs --dir and --pattern")
    if options.finished == "marker" and not options.marker:
        raise ValueError("--finished marker needs --marker")
    if options.keep < 0 or options.nodes < 1:
        raise ValueError("--keep is at least 0 and --nodes at least 1")
    store = folder_of(_config(options).url)
    others = {} if store is None else {"the store": store.resolve()}
    if why := conflict(options.dir.resolve(), options.pattern, others):
        raise ValueError(f"--dir: {why}")
    return Rules(
        directory=options.dir,
        pattern=options.pattern,
        prefix=options.name,
        finished=Finished(how=options.finished, marker=options.marker, quiet_s=options.quiet_s),
        delete=options.delete,
        keep=options.keep,
        shared=options.shared,
        node=options.node,
        nodes=options.nodes,
        attempts=options.attempts,
    )


def _end_after(stop: threading.Event, over: threading.Event, drain_s: float) -> None:
    """Bound the time from the word to end, also where it comes in the middle of an upload."""
    stop.wait()
    over.wait(drain_s)
    over.set()


def _say_alive(over: threading.Event) -> None:
    while emit({"event": "alive"}) and not over.wait(_ALIVE_S):
        pass


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that are still sending would keep the interpreter alive
