"""A rank of ours: `python -m tests.bench.checkpoint.rank NBYTES TOKENS`; see `children.serve`."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from botocore.config import Config
from numpy.typing import NDArray

from checkpointing import Checkpointer
from checkpointing.checksum import crc64
from checkpointing.restore import Point, restore_from_memory, restore_from_store
from checkpointing.stage.arena import peek
from checkpointing.stage.crew import Crew, share_of_cores
from checkpointing.store.base import ObjectStore, StoreConfig, open_store
from tests.bench.checkpoint.children import die_with_parent, serve
from tests.bench.checkpoint.training import Training, together

_BLOCK = 16 << 20
_LARGEST_BUFFER = 512 << 20  # larger than any cache; a copy goes over it again
_GET_THREADS = 8
_GET_PIECE = 32 << 20
_SIP = 1 << 20


class Rank:
    """What the bench asks of a rank."""

    def __init__(self, nbytes: int, tokens: int) -> None:
        self._training = Training(nbytes, tokens)
        self._sources = [_bytes(tensor) for tensor in self._training.locals.values()]
        self._sums: list[int] = []
        self._done = 0
        self._fenced_s = 0.0
        self._fence_begun = 0.0
        self._ck: Checkpointer | None = None
        self._crew = Crew(share_of_cores(self._training.world))
        self._buffer: NDArray[np.uint8] | None = None
        self._shared: NDArray[np.uint8] | None = None
        self._store: ObjectStore | None = None

    def describe(self) -> dict[str, Any]:
        return {"nbytes": self._training.nbytes, "tensors": len(self._sources)}

    def prepare(self, overlap: bool) -> float:
        """Take the memory, as a script does before its first step."""
        optimizer = self._training.optimizer
        self._ck = Checkpointer.from_env(overlap=overlap)
        optimizer.register_step_pre_hook(self._before_fence)
        if overlap:
            self._ck.guard(optimizer)
        optimizer.register_step_pre_hook(self._after_fence)
        begun = together()
        self._ck.restore(self._training.state)
        return time.perf_counter() - begun

    def done(self) -> int:
        """Return the number of finished steps."""
        return self._done

    def save(self) -> float:
        begun = together()
        self._step_done(save=True)
        took = time.perf_counter() - begun
        staged = peek(Path(os.environ["EVERSTEP_ARENA"]))
        if not staged or staged[0].step != self._done:
            raise AssertionError("the save was left out")
        return took

    def copy(self, shared: bool) -> float:
        """Copy the same bytes with the same threads, in the same blocks, into warm memory.

        Args:
            shared: Into memory that other processes can see, as the arena.
        """
        nbytes = min(self._training.nbytes, _LARGEST_BUFFER)
        buffer = self._shared_buffer(nbytes) if shared else self._warm_buffer(nbytes)
        tasks, at = [], 0
        for source in self._sources:
            for start in range(0, source.nbytes, _BLOCK):
                piece = source[start : start + _BLOCK]
                at = 0 if at + piece.nbytes > buffer.nbytes else at
                tasks.append(partial(np.copyto, buffer[at : at + piece.nbytes], piece))
                at += piece.nbytes
        begun = together()
        self._crew.run(tasks)
        return time.perf_counter() - begun

    def overlapped(self, save: bool, steps: int) -> dict[str, float]:
        """Train some steps, with a save after the first; blocked is all but training."""
        self._fenced_s = blocked_s = 0.0
        begun = together()
        for number in range(steps):
            self._training.step(0.0)
            at = time.perf_counter()
            self._step_done(save=save and number == 0)
            blocked_s += time.perf_counter() - at
        return {
            "blocked_s": blocked_s + self._fenced_s,
            "took_s": time.perf_counter() - begun,
        }

    def train(self, save: bool, flag: str, at_least: int, at_most: int) -> dict[str, Any]:
        """Train until a file appears, with or without a save before."""
        together()
        if save:
            self._step_done(save=True)
        saved_at, times, seen = time.monotonic(), [], 0.0
        while len(times) < at_most and not (seen and len(times) >= at_least):
            begun = time.monotonic()
            seen = self._training.step(float(Path(flag).exists()))
            times.append((begun, time.monotonic()))
            self._step_done(save=False)
        return {"saved_at": saved_at, "times": times}

    def restore_memory(self, step: int, mapped: bool) -> float:
        """Restore from the own arena into a state that was wiped.

        Args:
            step: Which one.
            mapped: Use the mapping that saves go to, as a training script does; not a new one.
        """
        assert self._ck is not None
        assert self._ck._saver is not None
        training, stager = self._training, self._ck._saver.stager
        arena = stager.arena() if mapped else None
        self._wipe()
        begun = together()
        restore_from_memory(
            arena or Path(os.environ["EVERSTEP_ARENA"]),
            Point(step=step, attempt=1),
            training.rank,
            training.world,
            training.state,
            None,
            stager.crew,
        )
        took = time.perf_counter() - begun
        self._check()
        return took

    def restore_store(self, step: int) -> tuple[float, float]:
        """Restore from the store into a state that was wiped; seconds and CPU seconds."""
        training = self._training
        if self._store is None:
            self._store = open_store(StoreConfig.from_json(os.environ["EVERSTEP_STORE"]))
            self._store.list("")  # makes the connection, as the peer's is made
        self._wipe()
        begun, used = together(), time.process_time()
        restore_from_store(
            self._store,
            os.environ["EVERSTEP_RUN"],
            Point(step=step, attempt=1),
            training.rank,
            training.world,
            training.state,
            None,
        )
        took = time.perf_counter() - begun, time.process_time() - used
        self._check()
        return took

    def raw_get(self, bucket: str, keys: list[str], ranged: bool) -> tuple[float, float]:
        """Get this rank's object with boto3 into warm memory, unverified; seconds, CPU seconds."""
        config = StoreConfig.from_json(os.environ["EVERSTEP_STORE"])
        client = boto3.client(
            "s3",
            endpoint_url=config.endpoint_url,
            region_name=config.region,
            config=Config(
                s3={"addressing_style": "path"},
                max_pool_connections=_GET_THREADS,
                response_checksum_validation="when_required",
            ),
        )
        key = keys[self._training.rank]
        nbytes = client.head_object(Bucket=bucket, Key=key)["ContentLength"]
        out = self._warm_buffer(nbytes)[:nbytes].data
        piece = _GET_PIECE if ranged else nbytes

        def get(start: int) -> None:
            end = min(start + piece, nbytes)
            answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
            with answer["Body"] as stream:
                at = start
                while at < end:
                    at += stream.readinto(out[at : min(at + _SIP, end)])

        with ThreadPoolExecutor(_GET_THREADS if ranged else 1) as pool:
            list(pool.map(lambda _: client.list_objects_v2(Bucket=bucket, MaxKeys=1), range(8)))
            begun, used = together(), time.process_time()
            list(pool.map(get, range(0, nbytes, piece)))
            return time.perf_counter() - begun, time.process_time() - used

    def _step_done(self, *, save: bool) -> None:
        assert self._ck is not None
        self._done += 1
        self._ck.step(self._done, self._training.state if save else None)

    def _before_fence(self, *_: object) -> None:
        self._fence_begun = time.perf_counter()

    def _after_fence(self, *_: object) -> None:
        self._fenced_s += time.perf_counter() - self._fence_begun

    def _warm_buffer(self, nbytes: int) -> NDArray[np.uint8]:
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer = np.zeros(nbytes, np.uint8)
            self._buffer[:] = 1
        return self._buffer

    def _shared_buffer(self, nbytes: int) -> NDArray[np.uint8]:
        if self._shared is None:
            path = Path(os.environ["EVERSTEP_ARENA"]).with_name(f"copy-{self._training.rank}")
            self._shared = np.memmap(path, np.uint8, "w+", shape=(nbytes,))
            self._shared[:] = 1
        return self._shared

    def _wipe(self) -> None:
        self._sums = [crc64(source.data) for source in self._sources]
        for source in self._sources:
            source[:] = 0

    def _check(self) -> None:
        if [crc64(source.data) for source in self._sources] != self._sums:
            raise AssertionError("what was restored is not what was saved")


def _bytes(tensor: Any) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = tensor.numpy().reshape(-1).view(np.uint8)
    return found


def main() -> None:
    die_with_parent()
    rank = Rank(int(sys.argv[1]), int(sys.argv[2]))
    names = ("describe", "done", "prepare", "save", "copy", "overlapped", "train")
    names += ("restore_memory", "restore_store", "raw_get")
    serve({name: getattr(rank, name) for name in names})


if __name__ == "__main__":
    main()
