"""Tensors and arrays as plain bytes. torch is used only when the state has torch tensors."""

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from checkpointing.checksum import combine, crc64
from checkpointing.sharded import Sharded, is_sharded

Bytes = NDArray[np.uint8]
BLOCK: Final = 16 << 20
CHUNK: Final = 512 << 10
"""Copied and summed piece by piece, while it is in the cache of a core."""


def plain(leaf: Any) -> Any:
    """Return what holds a leaf's bytes here: of a piece the local tensor, not copied."""
    if not is_sharded(leaf):
        return leaf
    if isinstance(leaf, Sharded):
        return leaf.local
    with sys.modules["torch"].no_grad():  # with gradients it takes ten times as long
        return leaf.to_local().detach()


def is_tensor(value: object) -> bool:
    """Tell a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def plain_kind(value: Any) -> str:
    """Return the kind of an ordinary tensor that can be kept, "" for everything else."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return ""
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return ""
    return "tensor"


def unsupported(leaf: Any) -> str | None:
    """Say why a tensor or array cannot be kept as raw bytes; None when it can."""
    leaf = plain(leaf)
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind not in "biufc" or not leaf.dtype.isnative:
            return f"array of dtype {leaf.dtype}"
        return None
    import torch

    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return f"tensor subclass {type(leaf).__name__}: save its local plain tensor"
    if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_meta:
        return "sparse, quantized or meta tensor"
    return None


def dtype_of(leaf: Any) -> str:
    """Return the dtype's name, alike for torch and numpy."""
    leaf = plain(leaf)
    if isinstance(leaf, np.ndarray):
        return str(leaf.dtype.name)
    return _torch_name(leaf.dtype)


def shape_of(leaf: Any) -> tuple[int, ...]:
    """Return the shape of what is held here."""
    return tuple(plain(leaf).shape)


def nbytes_of(leaf: Any) -> int:
    """Return the bytes of the elements that are held here."""
    leaf = plain(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    return int(leaf.numel()) * int(leaf.element_size())


def form_of(leaf: Any) -> tuple[str, tuple[int, ...], int]:
    """Return dtype, shape and bytes of what is held here, looking only once."""
    held = plain(leaf)
    if isinstance(held, np.ndarray):
        return str(held.dtype.name), held.shape, held.nbytes
    return _torch_name(held.dtype), tuple(held.shape), held.numel() * held.element_size()


@cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def empty(kind: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a new CPU tensor or array, not filled."""
    if kind == "ndarray":
        return np.empty(shape, np.dtype(dtype))
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype))


def bytes_of(leaf: Any) -> Bytes | None:
    """Return the bytes in place; None when they are elsewhere or not in one row."""
    leaf = plain(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.reshape(-1).view(np.uint8) if leaf.flags.c_contiguous else None
    import torch

    row = leaf.detach()
    if row.numel() == 0:
        return np.empty(0, np.uint8)
    if row.device.type != "cpu" or not row.is_contiguous() or row.is_conj() or row.is_neg():
        return None
    # Not `reshape`: of one element it leaves a stride as it is, which `view` refuses.
    flat: Bytes = row.as_strided((row.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def copy_out(leaf: Any, out: Bytes) -> int:
    """Copy a leaf's bytes to `out` and return their CRC64."""
    leaf = plain(leaf)
    source = bytes_of(leaf)
    if source is None:
        if isinstance(leaf, np.ndarray):
            out.view(leaf.dtype).reshape(leaf.shape)[...] = leaf
        else:
            import torch

            torch.from_numpy(out).view(leaf.dtype).view(leaf.shape).copy_(leaf.detach())
        return crc64(out.data)
    return copy_and_sum(source, out)


def copy_and_sum(source: Bytes, out: Bytes, chunk: int = CHUNK) -> int:
    """Copy bytes, unless both are the same, and return their CRC64."""
    is_there = source.ctypes.data == out.ctypes.data
    view, crc = out.data, 0
    for at in range(0, out.nbytes, chunk):
        if not is_there:
            np.copyto(out[at : at + chunk], source[at : at + chunk])
        crc = crc64(view[at : at + chunk], crc)
    return crc


def sums_of(data: Bytes) -> tuple[int, tuple[int, ...]]:
    """Return the CRC64 of bytes, and those of each `BLOCK` bytes when there are more.

    Who restores a part of them can so verify what it reads without reading all.
    """
    blocks = [crc64(data[at : at + BLOCK].data) for at in range(0, data.nbytes, BLOCK)]
    if len(blocks) < 2:
        return (blocks or [0])[0], ()
    return combined(blocks, data.nbytes), tuple(blocks)


def combined(blocks: Sequence[int], nbytes: int) -> int:
    """Return the CRC64 of bytes from those of their blocks."""
    return combine((crc, min(BLOCK, nbytes - n * BLOCK)) for n, crc in enumerate(blocks))


def crc_of(leaf: Any) -> int:
    """Return the CRC64 of a leaf's bytes, through a copy when they are not in one row here."""
    held = bytes_of(leaf)
    if held is None:
        return copy_out(leaf, np.empty(nbytes_of(leaf), np.uint8))
    return crc64(held.data)


def copy_in(leaf: Any, data: Bytes) -> None:
    """Fill a leaf that `bytes_of` could not show, from bytes of its dtype and shape."""
    leaf = plain(leaf)
    if not data.nbytes:
        return
    if isinstance(leaf, np.ndarray):
        leaf[...] = data.view(leaf.dtype).reshape(leaf.shape)
        return
    import torch

    with torch.no_grad():
        leaf.detach().copy_(torch.from_numpy(data).view(leaf.dtype).view(leaf.shape))
