"""SHA-256 of a trained state, to show that two runs ended in the same bits.

The form is that of `checkpointing.content.content_sha256`, so the sums that a run prints at its end
can be compared with those of its last committed checkpoint.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def tensor_sha256(state: Mapping[str, Any]) -> str:
    """Hash every tensor of a nested mapping: path, dtype, shape and bytes, sorted by path.

    Numbers that are no tensors are left out; a tensor that is shared is hashed under each name.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(state, ""), key=lambda item: item[0]):
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, dtype, list(tensor.shape)]).encode())
        digest.update(_raw_bytes(tensor))
    return digest.hexdigest()


def _tensors(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        name = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Tensor):
            yield name, value.detach()
        elif isinstance(value, Mapping):
            yield from _tensors(value, name)


def _raw_bytes(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().cpu().flatten()
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw)
