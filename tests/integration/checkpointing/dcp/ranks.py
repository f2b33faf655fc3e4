"""Jobs of a few real ranks with gloo, kept between tests: the import of torch is paid once."""

import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.ports import held_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.fsdp"])


_GRACE_S = 5.0


class RankFailed(Exception):
    pass


class Ranks:
    """`world` processes in one process group that run functions of test modules."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._stack = ExitStack()
        port = self._stack.enter_context(held_port())
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs, rank, world, port))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def broken(self) -> bool:
        return not all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 100.0) -> list[Any]:
        """Run a function of a module on all ranks; return what each returned.

        A rank that fails leaves the others waiting for it: the job ends, with that rank's reason.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world:
            waiting = {pipe: n for n, pipe in enumerate(self._pipes) if n not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                number = waiting[pipe]  # type: ignore[index]
                try:
                    answers[number] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[number] = RankFailed("died")
                if isinstance(answers[number], RankFailed):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        failed = {n: why for n, why in answers.items() if isinstance(why, RankFailed)}
        if failed or len(answers) < self.world:
            self.close()
            silent = sorted(set(range(self.world)) - set(answers))
            raise RankFailed(f"of {self.world} ranks {silent} are silent, and failed: {failed}")
        return [answers[number] for number in range(self.world)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        self._stack.close()


def _serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(function(*args))
        except BaseException:  # noqa: BLE001 - the answer
            pipe.send(RankFailed(traceback.format_exc()))
