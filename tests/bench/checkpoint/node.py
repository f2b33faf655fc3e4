"""One node without an agent: a folder in shared memory, ranks, an uploader, and an S3 server."""

import contextlib
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointing import slot
from checkpointing.commit import UploadRecord, commit
from checkpointing.slot import Control, SlotView
from checkpointing.stage.arena import MappedArena, UploadState, peek
from checkpointing.store.base import StoreConfig, open_store
from deploy.demo.s3_server import REGION, S3Server
from tests.bench.checkpoint.children import ANSWER_S, ROOT, Child, Failed, World, on_core

MIB = 1 << 20
WORLD = 2
TOKENS = 64
RUN = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How much is measured, and where.

    Attributes:
        mib: Size of the state of all ranks together.
        repeats: Of what the medians are taken, after one warm-up.
        quick: A coarse answer soon.
        folder: On a disk; the data of servers are no business of shared memory.
        say: Tells how it goes.
        peers: Where the environment with the peers is, or shall be; None for a temporary one.
    """

    mib: int
    repeats: int
    quick: bool
    folder: Path
    say: Any
    peers: Path | None = None

    @property
    def shard_nbytes(self) -> int:
        """Bytes of each rank."""
        return self.mib * MIB // WORLD

    @property
    def what(self) -> str:
        """The state for a person."""
        return f"{self.mib} MiB on {WORLD} ranks"


@dataclass(slots=True)
class Node:
    """Where slots and arenas lie, and the store that uploads go to."""

    setup: Setup
    folder: Path
    config: StoreConfig
    _views: list[SlotView] = field(default_factory=list)

    def arena(self, rank: int) -> Path:
        """Return a rank's arena."""
        return self.folder / f"arena-{rank}"

    @contextlib.contextmanager
    def ranks(
        self,
        module: str = "rank",
        *,
        mib: int | None = None,
        tokens: int = TOKENS,
        core: int | None = None,
        python: Path | None = None,
    ) -> Iterator[World]:
        """Start ranks with a state; end them afterwards, and leave no arena.

        Args:
            module: What a rank runs.
            mib: Size of the state, that of the setup by default.
            tokens: In a batch.
            core: Where they all run.
            python: Their interpreter.
        """
        nbytes = (mib or self.setup.mib) * MIB // WORLD
        argv = ["-m", f"tests.bench.checkpoint.{module}", str(nbytes), str(tokens)]
        rendezvous = self.folder / f"rendezvous-{secrets.token_hex(4)}"
        children = []
        try:
            for rank in range(WORLD):
                log = self.setup.folder / f"rank-{rank}.log"
                environment = self._environment(rank, rendezvous)
                children.append(
                    Child(f"rank {rank}", argv, log, environment, python=python, core=core)
                )
            world = World(children)
            world.ask("describe")
            yield world
        finally:
            for child in children:
                child.close()
            for view in self._views:
                view.close()
            self._views.clear()
            for path in self.folder.iterdir():
                path.unlink()

    def _environment(self, rank: int, rendezvous: Path) -> dict[str, str]:
        path = self.folder / f"slot-{rank}"
        slot.create(path)
        self._views.append(SlotView(path))
        self._views[-1].set_control(Control(interval_steps=1))
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_WORLD_SIZE": str(WORLD),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "BENCH_RENDEZVOUS": str(rendezvous),
            **({"AWS_ENDPOINT_URL": self.config.endpoint_url} if self.config.endpoint_url else {}),
            "EVERSTEP_RUN": RUN,
            "EVERSTEP_ATTEMPT": "1",
            "EVERSTEP_SLOT": str(path),
            "EVERSTEP_ARENA": str(self.arena(rank)),
            "EVERSTEP_STORE": self.config.to_json(),
        }

    def newest_step(self) -> int:
        """Return the step that all ranks have staged last."""
        return min(peek(self.arena(rank))[0].step for rank in range(WORLD))

    def mark_uploaded(self) -> None:
        """Say that the store has everything, as an uploader would."""
        for rank in range(WORLD):
            arena = MappedArena(self.arena(rank))
            for staged in arena.staged():
                arena.headers[staged.index].mark(staged.sequence, UploadState.UPLOADED)
            arena.close()

    def commit(self, events: Sequence[dict[str, Any]]) -> None:
        """Commit what was uploaded."""
        uploads = [
            UploadRecord(rank=e["rank"], index_key=e["index_key"], index_crc64=e["index_crc64"])
            for e in events
        ]
        outcome = commit(
            open_store(self.config), RUN, events[0]["step"], 1, uploads, WORLD, "bench"
        )
        if not outcome.committed:
            raise Failed(outcome.why)


class Uploader:
    """The real uploader of a node."""

    def __init__(
        self, node: Node, *, max_bytes_per_s: float | None = None, core: int | None = None
    ) -> None:
        argv = [sys.executable, "-m", "checkpointing.uploader", "--dir", str(node.folder)]
        argv += ["--store", node.config.to_json(), "--run", RUN]
        if max_bytes_per_s is not None:
            argv += ["--max-bytes-per-s", str(max_bytes_per_s)]
        log = node.setup.folder / "uploader.log"
        with log.open("ab") as errors, on_core(core):
            self.process = subprocess.Popen(
                argv,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._next(ANSWER_S)  # its first sign of life

    def uploaded(self, step: int, timeout_s: float = ANSWER_S) -> list[dict[str, Any]]:
        """Wait for the uploads of all ranks; each event gets `at`, when it was heard.

        Raises:
            Failed: One of them failed, or they did not come in time.
        """
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < WORLD:
            event = self._next(max(0.1, deadline - time.monotonic()))
            if event["event"] == "upload_failed":
                raise Failed(f"upload: {event['error']}")
            if event["event"] == "uploaded" and event["step"] == step:
                found[event["rank"]] = event
            elif time.monotonic() > deadline:
                raise Failed(f"step {step} was not uploaded within {timeout_s:.0f} s")
        return [found[rank] for rank in range(WORLD)]

    def close(self) -> None:
        """End it at once: what it still sends is of no use to anybody."""
        self.process.kill()
        self.process.wait()

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            raise Failed(f"the uploader said nothing for {timeout_s:.0f} s") from None
        if event is None:
            raise Failed("the uploader ended")
        return event

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self._events.put({**json.loads(line), "at": time.monotonic()})
        self._events.put(None)


@contextlib.contextmanager
def node(setup: Setup, server: S3Server | None = None) -> Iterator[Node]:
    """Make a node's folder in shared memory; nothing of it is left."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir="/dev/shm"))
    config = StoreConfig(url=(setup.folder / "store").as_uri())
    if server is not None:
        url = f"{server.store_url}/{secrets.token_hex(4)}"
        config = StoreConfig(url=url, endpoint_url=server.url, region=REGION)
    try:
        yield Node(setup, folder, config)
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def uploader(
    node: Node, *, max_bytes_per_s: float | None = None, core: int | None = None
) -> Iterator[Uploader]:
    """Run an uploader."""
    running = Uploader(node, max_bytes_per_s=max_bytes_per_s, core=core)
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def s3_server(setup: Setup, core: int | None = None) -> Iterator[S3Server]:
    """Run an S3 server on a fresh folder, which goes with it; this process gets its credentials."""
    with tempfile.TemporaryDirectory(prefix="s3-", dir=setup.folder) as name:
        before = dict(os.environ)
        with on_core(core):
            server = S3Server(Path(name))
            server.__enter__()
        try:
            os.environ.update(server.environment())
            yield server
        finally:
            os.environ.clear()
            os.environ.update(before)
            _stop(server)


def _stop(server: S3Server) -> None:
    """Stop a server, at once when there is no time for more: a second Ctrl-C leaves none."""
    pid = server.pid
    try:
        server.__exit__(None, None, None)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
