"""Trains weights that show every step, rank and world size that made them; no torch.

python adding_job.py STEPS SECONDS_A_STEP GATE [alike]: once the file GATE is there, steps take no
time; with `alike` no rank has a state of its own, so that another number of ranks can go on. The
ranks add their gradients up through rank 0, in rank order, and wait for each other in every
step, as ranks of a real training do: without one of them the others stand still.
"""

import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from checkpointing import Checkpointer

SIZE = 4096
CONNECT_S = 60.0
Vector = NDArray[np.float64]


class Sum:
    """Adds a vector up over all ranks."""

    def __init__(self, rank: int, world: int, address: str, port: int) -> None:
        self._peers: list[socket.socket] = []
        self._root: socket.socket | None = None
        if rank > 0:
            self._root = connected(address, port)
            self._root.sendall(bytes([rank]))
            return
        peers: dict[int, socket.socket] = {}
        with socket.create_server(("", port), backlog=world) as server:
            while len(peers) < world - 1:
                peer = server.accept()[0]
                peers[received(peer, 1)[0]] = peer
        self._peers = [peers[n] for n in sorted(peers)]

    def of(self, vector: Vector) -> Vector:
        if self._root is not None:
            self._root.sendall(vector.tobytes())
            return np.frombuffer(received(self._root, vector.nbytes))
        total = vector.copy()
        for peer in self._peers:
            total += np.frombuffer(received(peer, vector.nbytes))
        for peer in self._peers:
            peer.sendall(total.tobytes())
        return total


def connected(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_S
    while True:
        with suppress(OSError):
            link = socket.create_connection((address, port), timeout=CONNECT_S)
            link.settimeout(None)  # as a collective: waits for ever
            return link
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 does not listen at {address}:{port}")
        time.sleep(0.02)


def received(link: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = link.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("Connection reset by peer")
        parts += part
    return bytes(parts)


def main() -> None:
    steps, step_s, gate = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    state = {
        "model": {"weights": np.zeros(SIZE)},
        "optimizer": {"momentum": np.zeros(SIZE)},
        "steps": {"done": 0},
    }
    own = np.zeros(SIZE)  # a random walk: what a rank's place in the data is in a real training
    local = {"own": own} if "alike" not in sys.argv else None
    checkpointer = Checkpointer.from_env()
    start = checkpointer.restore(state, local)
    everybody = Sum(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    for step in range(start, steps):
        if not gate.exists():
            time.sleep(step_s)
        own *= local is not None
        own += np.random.default_rng((step, rank, world)).standard_normal(SIZE)
        mean = everybody.of(own) / world
        state["optimizer"]["momentum"] *= 0.9
        state["optimizer"]["momentum"] += mean - 0.1 * state["model"]["weights"]
        state["model"]["weights"] += 0.01 * state["optimizer"]["momentum"]
        state["steps"]["done"] = step + 1
        loss = float(np.abs(state["model"]["weights"]).mean())
        checkpointer.step(step + 1, state, local, loss=loss, tokens=world * (step + 1))
        if checkpointer.should_stop:
            return
    checkpointer.finish(steps, state, local)


main()
