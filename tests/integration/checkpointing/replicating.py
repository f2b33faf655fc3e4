"""The real process of a node that copies snapshots, and a rank's arena beside it."""

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from checkpointing.replicas.replica import Name
from checkpointing.replicas.wire import parse
from checkpointing.restore import Point, restore_from_memory
from checkpointing.stage.stager import Stager
from checkpointing.tiers import Tier

TOKEN = "the token of this run"
WAIT_S = 60.0


class ReplicaNode:
    """One node: its folder, its process, and the rank that stages there.

    Args:
        folder: Of this node.
        options: More arguments of the process.
        under: A command that becomes the process.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        rank: int = 0,
        world: int = 1,
        under: Sequence[str | Path] = (),
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.disk = folder.parent / "disk"
        self.arena = folder / f"arena-{rank}"
        self.events: list[dict[str, Any]] = []
        self._options = options
        self._under = under
        self._rank, self._world = rank, world
        self._stager = Stager(self.arena, attempt=1, rank=rank, world=world)
        self.start()

    def start(self, token: str = TOKEN) -> None:
        command = [
            *map(str, self._under),
            *(sys.executable, "-m", "checkpointing.replicas", "--dir", str(self.folder)),
            *("--run", "r", "--node", "n", "--host", "127.0.0.1", "--disk", str(self.disk)),
            *("--until-eof", *self._options),
        ]
        self.events.clear()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        self._write(token.encode())

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.events.append(json.loads(line))
        process.stdout.close()

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def say(self, **order: Any) -> None:
        self._write(json.dumps(order).encode())

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in tuple(self.events) if event["event"] == kind]

    def until(self, true: Callable[[], Any], why: str = "") -> Any:
        deadline = time.monotonic() + WAIT_S
        while not (found := true()):
            assert time.monotonic() < deadline, (why, self.events[-10:])
            time.sleep(0.002)
        return found

    @property
    def address(self) -> str:
        return str(self.until(lambda: self.of("listening"))[-1]["address"])

    def held(self, tier: str) -> list[int]:
        told = self.of("held")
        return [one["step"] for one in told[-1]["replicas"] if one["tier"] == tier] if told else []

    def coming(self) -> list[Path]:
        """What is half there, for others and on the disk."""
        folders = (self.folder / "replicas", self.disk / "r")
        return [path for folder in folders for path in folder.glob(".coming-*")]

    def stage(self, step: int, nbytes: int, tiers: Tier) -> None:
        self._stager.stage(step, content(step, nbytes), {"own": np.full(3, step)}, tiers=tiers)

    def name(self, step: int) -> Name:
        return Name(attempt=1, step=step, rank=self._rank, world=self._world)

    def fetch(self, name: Name, *sources: str) -> dict[str, Any]:
        number = len(self.of("fetched")) + 1
        arena = str(self.folder / f"arena-{name.rank}")
        self.say(do="fetch", id=number, **name.to_json(), **{"from": sources}, arena=arena)
        return self.until(lambda: [e for e in self.of("fetched") if e["id"] == number])[0]

    def restores(self, step: int, nbytes: int) -> bool:
        found, own = {"w": np.zeros(nbytes // 8, np.int64), "n": 0}, {"own": np.zeros(3, int)}
        point = Point(step=step, attempt=1)
        restore_from_memory(self.arena, point, self._rank, self._world, found, own)
        same = np.array_equal(found["w"], content(step, nbytes)["w"])
        return same and found["n"] == step and own["own"].tolist() == [step] * 3

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def stop(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self._end()

    def _end(self) -> int:
        code = self.process.wait(20)
        self._reader.join(10)
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        return code


def content(step: int, nbytes: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).integers(0, 1 << 62, nbytes // 8), "n": step}


class Spoiler:
    """Passes connections on: of the first it flips a bit, the second it cuts, the others are well.

    Args:
        address: Where to.
        at: Which byte of what the client says.
    """

    def __init__(self, address: str, at: int) -> None:
        self._to = parse(address)
        self._at = at
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)

    def _serve(self) -> None:
        for number in itertools.count():
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client, socket.create_connection(self._to) as server:
                back = threading.Thread(target=self._pass_on, args=(server, client, None))
                back.start()
                self._pass_on(client, server, number)
                back.join(10)

    def _pass_on(self, source: socket.socket, target: socket.socket, number: int | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while chunk := bytearray(source.recv(1 << 16)):
                if number in (0, 1) and passed <= self._at < passed + len(chunk):
                    if number:
                        break
                    chunk[self._at - passed] ^= 1
                passed += len(chunk)
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)
