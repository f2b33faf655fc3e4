"""Copies from a GPU: into an arena that CUDA knows, on a stream of their own."""

import logging
import sys
from collections.abc import Iterable
from typing import Any

from checkpointing.leaves import Bytes

_log = logging.getLogger(__name__)


class SideStream:
    """The copies of one device.

    Args:
        device: As tensors name it.
    """

    def __init__(self, device: Any) -> None:
        self._torch: Any = sys.modules["torch"]  # the tensors are its own
        self._device = device
        self._stream = self._torch.cuda.Stream(device)

    def copy(self, at_once: Iterable[tuple[Any, Bytes]], later: Iterable[tuple[Any, Bytes]]) -> Any:
        """Begin copies of (tensor, destination) and return an event that comes after all of them.

        What may change in the next forward is copied before anything that is queued from now on;
        the rest beside it, on the side stream.
        """
        torch = self._torch
        with torch.cuda.device(self._device), torch.no_grad():
            current = torch.cuda.current_stream(self._device)
            self._enqueue(at_once)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._enqueue(later)
            event = torch.cuda.Event()
            event.record(self._stream)
            return event

    def hold(self, event: Any) -> None:
        """Let nothing that is queued from now on run before the copies; the host does not wait."""
        self._torch.cuda.current_stream(self._device).wait_event(event)

    def _enqueue(self, pairs: Iterable[tuple[Any, Bytes]]) -> None:
        torch = self._torch
        for leaf, out in pairs:
            target = torch.from_numpy(out).view(leaf.dtype).view(leaf.shape)
            target.copy_(leaf.detach(), non_blocking=True)


class Registration:
    """Memory that CUDA may copy to by itself, until it is closed."""

    def __init__(self, memory: Bytes) -> None:
        torch = sys.modules["torch"]
        self._address = int(memory.ctypes.data)
        self._runtime = torch.cuda.cudart()
        result = self._runtime.cudaHostRegister(self._address, memory.nbytes, 0)
        self._is_held = int(result) == 0
        if not self._is_held:
            _log.warning("the arena could not be registered with CUDA (%s): slower copies", result)

    def close(self) -> None:
        """Give it back; before it is unmapped."""
        if self._is_held:
            self._is_held = False
            self._runtime.cudaHostUnregister(self._address)


def is_on_gpu(leaf: Any) -> bool:
    """Tell a CUDA tensor, without importing torch."""
    return bool(getattr(leaf, "is_cuda", False))
