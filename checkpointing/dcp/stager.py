"""Copies a state dict aside for `dcp.async_save`: one long-lived buffer instead of one per tensor.

All tensors of a save lie in one piece of shared memory, which DCP's process mode hands over by one
descriptor and without another copy. Two such buffers take turns; one is free again when the last
tensor in it is gone, which is when DCP is done with the save.
"""

import copy
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, Final

import torch
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from checkpointing.dcp.buffers import Pool
from checkpointing.dcp.daemon import ensure_daemon

_ALIGN: Final = 64
_PIECE: Final = 16 << 20
_SMALL: Final = 256 << 10
_ATOMS: Final = (bool, int, float, complex, str, bytes, type(None))


class EverstepStager(AsyncStager):
    """Stages on the CPU; one instance is to be kept for all saves of a run.

    Args:
        overlap: Return at once and copy in a thread; the training may not change the state until
            `staging_completion` of what `dcp.async_save` returned.
        process: For `AsyncCheckpointerType.PROCESS`: sees before each save that DCP's background
            process is there on every rank, replaces one that died, and bounds the wait for it.
        process_group: That of the saves, for `process`.
        deadline_s: Longest wait for the previous saves, and for an answer of the background
            process.
    """

    def __init__(
        self,
        *,
        overlap: bool = False,
        process: bool = False,
        process_group: ProcessGroup | None = None,
        deadline_s: float = 1800.0,
    ) -> None:
        self._process = process
        self._group = process_group
        self._deadline_s = deadline_s
        self._pool = Pool()
        self._overlap = ThreadPoolExecutor(1, thread_name_prefix="dcp-stage") if overlap else None
        self._staging: Future[dict[str, Any]] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """The copy is complete, or waited for by its future."""
        return False

    def warm_up(self) -> None:
        """Start the background process of `process` now, on all ranks, instead of at a save."""
        if self._process:
            ensure_daemon(self._group, self._deadline_s)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any] | Future[dict[str, Any]]:
        """Return a copy that no later training step changes.

        Raises:
            StageBusy: Both buffers are in use by earlier saves, for longer than the deadline.
            TypeError: A kind of tensor that cannot be copied aside.
        """
        self.warm_up()
        if self._overlap is None:
            return self._stage(state_dict)
        self._staging = self._overlap.submit(self._stage, state_dict)
        return self._staging

    def synchronize_staging(self) -> None:
        """Wait for the copy."""
        if self._staging is not None:
            wait([self._staging], timeout=self._deadline_s)

    def close(self) -> None:
        """Give the memory back, once nobody reads it any more."""
        if self._overlap is not None:
            self._overlap.shutdown(wait=True)
        self._pool = Pool()

    @torch.no_grad()
    def _stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        found: dict[int, torch.Tensor] = {}
        _collect(state_dict, (), found)
        end, places = 0, []
        for tensor in found.values():
            places.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        pool = self._pool
        buffer = pool.take(end, self._deadline_s)
        holder = _Holder()
        weakref.finalize(holder, pool.give_back, buffer).atexit = False
        views = _views(buffer, places, list(found.values()), holder)
        _copy_all(list(zip(views, found.values(), strict=True)))
        staged = dict(zip(found, views, strict=True))
        result: dict[str, Any] = _rebuild(state_dict, staged)
        return result


@cache
def shared_stager() -> EverstepStager:
    """Return the stager of all writers of this process that were given none."""
    return EverstepStager()


class _Holder:
    """Lives as long as the tensors of one save."""


def _views(
    buffer: torch.Tensor, places: list[int], like: list[torch.Tensor], holder: _Holder
) -> list[torch.Tensor]:
    """Return places of the buffer as tensors, each in a row whatever its model is."""
    typed: dict[torch.dtype, torch.Tensor] = {}
    found = []
    for place, tensor in zip(places, like, strict=True):
        dtype = tensor.dtype
        if dtype not in typed:
            rest = buffer.numel() // _ALIGN * _ALIGN
            typed[dtype] = buffer[:rest].view(dtype)
        shape = tensor.shape
        strides = tensor.stride() if tensor.is_contiguous() else _strides(shape)
        staged = typed[dtype].as_strided(shape, strides, place // tensor.element_size())
        staged._everstep = holder  # type: ignore[attr-defined]  # noqa: SLF001 - lives as long
        found.append(staged)
    return found


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy, large tensors in pieces by several threads: one does not fill the memory's bus."""
    small = [(to, tensor) for to, tensor in pairs if to.nbytes <= _SMALL]
    if small:
        targets, sources = zip(*small, strict=True)
        torch._foreach_copy_(targets, sources, non_blocking=True)
    large = ((to, tensor.detach()) for to, tensor in pairs if to.nbytes > _SMALL)
    pieces = [piece for to, tensor in large for piece in _pieces(to, tensor)]
    threads = min(4, os.cpu_count() or 1)
    if threads < 2 or len(pieces) < 2:
        for to, source in pieces:
            to.copy_(source, non_blocking=True)
    else:
        list(_copiers(threads).map(_copy_one, pieces))
    for device in {tensor.device for _, tensor in pairs if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _copy_one(piece: tuple[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        piece[0].copy_(piece[1], non_blocking=True)


@cache
def _copiers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="dcp-copy")


def _pieces(to: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if to.nbytes <= _PIECE or not source.is_contiguous() or source.is_cuda:
        yield to, source
        return
    step = _PIECE // to.element_size()
    pairs = zip(torch.split(to.view(-1), step), torch.split(source.view(-1), step), strict=True)
    yield from pairs


def _collect(value: Any, path: tuple[object, ...], found: dict[int, torch.Tensor]) -> None:
    """Find all tensors below a value, and what is to be copied of each: of a DTensor its piece."""
    if isinstance(value, torch.Tensor):
        if id(value) not in found:
            found[id(value)] = _plain(value, path)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            _collect(child, (*path, key), found)
    elif type(value) in (list, tuple):
        for number, child in enumerate(value):
            _collect(child, (*path, number), found)


def _plain(value: torch.Tensor, path: tuple[object, ...]) -> torch.Tensor:
    local = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001 - no graph
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    is_plain = type(local) in (torch.Tensor, torch.nn.Parameter) and not local.is_meta
    if is_plain and local.layout is torch.strided and not local.is_quantized:
        return local
    name = ".".join(map(str, path))
    if isinstance(value, ShardedTensor):
        raise TypeError(
            f"{name}: a ShardedTensor; have FSDP give DTensors (device_mesh=...), or stage with "
            "DCP's DefaultStager"
        )
    raise TypeError(
        f"{name}: cannot copy a {type(local).__name__} aside, {local.layout} on {local.device}"
    )


def _rebuild(value: Any, staged: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, DTensor):
        return _dtensor(value, staged[id(value)])
    if isinstance(value, torch.Tensor):
        return staged[id(value)]
    if isinstance(value, Mapping):
        return {key: _rebuild(child, staged) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_rebuild(child, staged) for child in value)
    return value if type(value) in _ATOMS else copy.deepcopy(value)


def _dtensor(like: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor around another local tensor, wherever that is.

    `from_local` would move it to the device of the mesh. And a DTensor that is made of a view with
    an offset cannot be pickled, which crashes the process: it is made of another one first.
    """
    make: Any = DTensor
    found: DTensor = make(local.new_empty(0), like._spec, requires_grad=False)  # noqa: SLF001
    found._local_tensor = local  # noqa: SLF001
    return found
