"""`python -m checkpointing.replicas --dir NODE_DIR --run NAME --node NODE --host ADDRESS`.

Copies what the ranks of this node stage to another node's memory and to a disk, takes in what
another node copies here, and brings snapshots back. Standard input brings the run's token as the
first line and then orders; standard output tells what happened, one JSON object per line:

    {"do":"buddy","address":"host:port"|null}    who gets this node's snapshots
    {"do":"fetch","id":1,"rank":0,"world":8,"step":40,"attempt":2,"from":["host:port","disk"],
     "arena":"NODE_DIR/arena-0"}                  first source that has it, whole
    {"do":"give_up","id":1}                       that would come too late: leave the arena alone
    {"do":"clear"}                                drop what is kept here for others
    {"event":"listening","address":"host:port"}
    {"event":"held","replicas":[{"tier":"peer","rank":0,...,"nbytes":1,"staged_at":1.0}]}
    {"event":"copied","tier":"disk",...,"nbytes":1,"seconds":0.1,"gb_per_s":1.0}
    {"event":"copy_failed","tier":"peer",...,"error":"one line"}       it is tried again
    {"event":"fetched","id":1,"ok":true,"from":"disk","nbytes":1,"seconds":0.1,"error":""}
    {"event":"refused","error":"one line"}        an order that is none
    {"event":"alive"}                             every few seconds

Ends with 0 when its standard input does, after the copies in flight had a short time; with 1 when
another one holds the folder, with 2 on wrong arguments or without a token.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Final

from checkpointing.companion import emit, fail, lock_for_one
from checkpointing.replicas.node import Node, Setting
from checkpointing.replicas.orders import Orders

_WHO: Final = "replicas"
_LEAST_RATE: Final = 4 << 20


def main() -> int:
    """Run until told to stop."""
    options = _options()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=f"{_WHO}: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal's and a scheduler's, for the agent
        signal.signal(number, signal.SIG_IGN)
    if not options.dir.is_dir():
        return fail(_WHO, 2, f"--dir: {options.dir} is no folder")
    if Path(options.run).name != options.run:
        return fail(_WHO, 2, f"--run: {options.run!r} is no name")
    orders, stop = Orders(), threading.Event()
    try:
        token = orders.token()
    except ValueError as error:
        return fail(_WHO, 2, str(error))
    held = lock_for_one(options.dir / "replicas.lock", stop)
    if held is None:
        return fail(_WHO, 1, f"another one works on {options.dir}")
    setting = Setting(
        folder=options.dir,
        run=options.run,
        host=options.host,
        disk=options.disk,
        max_bytes_per_s=options.max_bytes_per_s,
    )
    try:
        node = Node(setting, token, emit)
    except OSError as error:
        return fail(_WHO, 2, f"cannot start on {options.node}: {error}")
    threading.Thread(target=orders.follow, args=(node.obey, stop), daemon=True).start()
    node.run(stop)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="checkpointing.replicas", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="folder with the files arena-*")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--node", required=True, help="name of this node, for messages")
    parser.add_argument("--host", required=True, help="address that other nodes connect to")
    parser.add_argument("--disk", type=Path, help="folder on a disk of this node, for all runs")
    parser.add_argument("--max-bytes-per-s", type=_rate, help="copy no faster, all copies together")
    parser.add_argument(
        "--until-eof", action="store_true", help="as it always does: end when standard input ends"
    )
    return parser.parse_args()


def _rate(text: str) -> float:
    number = float(text)
    if not _LEAST_RATE <= number < float("inf"):
        raise ValueError(text)
    return number


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that still talk to another node would keep the interpreter alive
