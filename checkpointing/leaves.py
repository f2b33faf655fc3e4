"""Tensors and arrays as plain bytes. torch is used only when the state has torch tensors."""

import sys
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from checkpointing.checksum import crc64

Bytes = NDArray[np.uint8]
_CHUNK: Final = 1 << 20  # copied and summed piece by piece, while it is in the cache


def is_tensor(value: object) -> bool:
    """Tell a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def unsupported(leaf: Any) -> str | None:
    """Say why a tensor or array cannot be kept as raw bytes; None when it can."""
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
    if isinstance(leaf, np.ndarray):
        return str(leaf.dtype.name)
    return str(leaf.dtype).removeprefix("torch.")


def shape_of(leaf: Any) -> tuple[int, ...]:
    """Return the shape."""
    return tuple(int(size) for size in leaf.shape)


def nbytes_of(leaf: Any) -> int:
    """Return the bytes of the elements."""
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    return int(leaf.numel()) * int(leaf.element_size())


def empty(kind: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a new CPU tensor or array, not filled."""
    if kind == "ndarray":
        return np.empty(shape, np.dtype(dtype))
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype))


def bytes_of(leaf: Any) -> Bytes | None:
    """Return the bytes in place; None when they are elsewhere or not in one row."""
    if isinstance(leaf, np.ndarray):
        return leaf.reshape(-1).view(np.uint8) if leaf.flags.c_contiguous else None
    import torch

    plain = leaf.detach()
    if plain.numel() == 0:
        return np.empty(0, np.uint8)
    if plain.device.type != "cpu" or not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        return None
    flat: Bytes = plain.reshape(-1).view(torch.uint8).numpy()
    return flat


def copy_out(leaf: Any, out: Bytes) -> int:
    """Copy a leaf's bytes to `out` and return their CRC64."""
    source = bytes_of(leaf)
    if source is None:
        if isinstance(leaf, np.ndarray):
            out.view(leaf.dtype).reshape(leaf.shape)[...] = leaf
        else:
            import torch

            torch.from_numpy(out).view(leaf.dtype).view(leaf.shape).copy_(leaf.detach())
        return crc64(out.data)
    crc = 0
    for start in range(0, out.nbytes, _CHUNK):
        piece = out[start : start + _CHUNK]
        np.copyto(piece, source[start : start + _CHUNK])
        crc = crc64(piece.data, crc)
    return crc


def crc_of(leaf: Any) -> int:
    """Return the CRC64 of a leaf's bytes, through a copy when they are not in one row here."""
    held = bytes_of(leaf)
    if held is None:
        return copy_out(leaf, np.empty(nbytes_of(leaf), np.uint8))
    return crc64(held.data)


def copy_in(leaf: Any, data: Bytes) -> None:
    """Fill a leaf that `bytes_of` could not show, from bytes of its dtype and shape."""
    if not data.nbytes:
        return
    if isinstance(leaf, np.ndarray):
        leaf[...] = data.view(leaf.dtype).reshape(leaf.shape)
        return
    import torch

    with torch.no_grad():
        leaf.detach().copy_(torch.from_numpy(data).view(leaf.dtype).view(leaf.shape))
