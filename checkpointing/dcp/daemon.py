"""Keeps the background process of DCP's process mode usable.

torch starts it during the first save, on another thread than the one that looks whether it is
there; never replaces it, so that a killed one fails every later save of the run; and waits for its
answers without a deadline. Here all ranks look together, before a save.
"""

from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import _async_process_executor as executor

from checkpointing.errors import StoreUnavailable

_END_S: Final = 5.0


class _Daemon(executor._AsyncCheckpointProcess):  # noqa: SLF001 - torch has no public name for it
    """torch's background process, with a deadline on its answers."""

    def __init__(self, info: executor._ProcessGroupInitInfo, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        super().__init__(info)

    def _wait_for_response(self, timeout: float | None = None) -> Any:
        if timeout is None and not self._process_pipe.poll(self._deadline_s):
            _end(self)
            raise StoreUnavailable(
                f"DCP's background process gave no answer within {self._deadline_s:g} s; it is "
                "replaced at the next save"
            )
        return super()._wait_for_response(timeout)


def ensure_daemon(group: ProcessGroup | None, deadline_s: float) -> None:
    """See that every rank of a group has a living background process; a collective.

    One that is gone is replaced on all ranks: they talk to each other, so the rest is useless.
    """
    found = executor._CHECKPOINT_PROCESS  # noqa: SLF001
    alive = isinstance(found, _Daemon) and found._save_process.is_alive()  # noqa: SLF001
    vote = torch.tensor([int(alive)])
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
    if vote.item():
        return
    if found is not None:
        _end(found)
    executor._CHECKPOINT_PROCESS = None  # noqa: SLF001
    info = executor._ProcessGroupInitInfo(group)  # noqa: SLF001
    executor._CHECKPOINT_PROCESS = _Daemon(info, deadline_s)  # noqa: SLF001


def _end(daemon: executor._AsyncCheckpointProcess) -> None:
    daemon._save_process.kill()  # noqa: SLF001
    daemon._save_process.join(_END_S)  # noqa: SLF001 - from now on it counts as dead
