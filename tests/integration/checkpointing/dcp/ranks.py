"""Jobs of a few real ranks with gloo, kept between tests: the import of torch is paid once."""

import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.fsdp"])


class RankFailed(Exception):
    pass


class Ranks:
    """`world` processes in one process group that run functions of test modules."""

    def __init__(self, world: int) -> None:
        self.world = world
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
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
        """Run a function of a module on all ranks; return what each returned."""
        answers = self.try_run(function, *args, timeout=timeout)
        for rank, answer in enumerate(answers):
            if isinstance(answer, RankFailed):
                raise RankFailed(f"rank {rank} of {self.world}: {answer}")
        return answers

    def try_run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 100.0
    ) -> list[Any]:
        """As `run`, a failure being an answer as well."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(timeout):
                    raise EOFError
                answers.append(pipe.recv())
            except EOFError:
                self.close()
                raise RankFailed(f"no answer from rank {rank}") from None
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)


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
