"""The memory that saves are staged in: two buffers that take turns."""

import gc
import logging
import os
import threading
import time
import weakref
from typing import Final

import torch

from checkpointing.errors import StageBusy

BUFFERS: Final = 2
_LEAST: Final = 64
_POLL_S: Final = 0.01
_SHARED: Final = "/dev/shm"  # noqa: S108 - where torch puts it
_log = logging.getLogger(__name__)


class Pool:
    """At most two buffers, made larger when need be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        self._made = 0

    def take(self, nbytes: int, deadline_s: float) -> torch.Tensor:
        """Return a buffer that nobody reads."""
        deadline = time.monotonic() + deadline_s
        cleaned = False
        while (buffer := self._try(nbytes)) is None:
            if not cleaned:
                gc.collect()  # a failed save's traceback may hold one
                cleaned = True
            elif time.monotonic() > deadline:
                raise StageBusy(
                    f"{BUFFERS} earlier saves are not done after {deadline_s:g} s; wait for the "
                    "future of a save before the one after the next"
                )
            else:
                time.sleep(_POLL_S)
        if buffer.numel() >= nbytes:
            return buffer
        del buffer  # its memory is needed
        try:
            return _memory(nbytes)
        except BaseException:
            with self._lock:
                self._made -= 1
            raise

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        # The garbage collector may call this in the middle of `_try`: without the lock, at the end.
        self._free.append(buffer)

    def _try(self, nbytes: int) -> torch.Tensor | None:
        with self._lock:
            sizes = sorted((buffer.numel(), n) for n, buffer in enumerate(self._free))
            fitting = next((n for size, n in sizes if size >= nbytes), None)
            if fitting is None and self._made < BUFFERS:
                self._made += 1
                return torch.empty(0, dtype=torch.uint8)
            if not sizes:
                return None
            return self._free.pop(sizes[0][1] if fitting is None else fitting)


def _memory(nbytes: int) -> torch.Tensor:
    """Return a new buffer, shared where there is room for it, registered with CUDA where that is.

    Freshly mapped memory is touched here once, and not in every save.
    """
    size = max(-(-nbytes // _LEAST) * _LEAST, _LEAST)
    buffer = torch.empty(size, dtype=torch.uint8)
    try:
        stat = os.statvfs(_SHARED)
        if stat.f_bavail * stat.f_frsize < size:
            raise OSError(f"{_SHARED} is too small")
        buffer.share_memory_()  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        _log.warning("staging in private memory, which process mode copies once more: %s", error)
        buffer.zero_()
    if torch.cuda.is_available():
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0)) == 0:
            address = buffer.data_ptr()
            storage = buffer.untyped_storage()
            weakref.finalize(storage, runtime.cudaHostUnregister, address).atexit = False
    return buffer
