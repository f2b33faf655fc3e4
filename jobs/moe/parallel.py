"""Data parallelism: one flat bucket, one all-reduce, no DistributedDataParallel.

DDP lays out its buckets anew after the first backward pass, so the first step of a resumed process
would add the ranks' gradients in another order than the same step of the undisturbed run, and both
would end in different weights. Here the names of the parameters fix the layout, and loss and expert
load travel in the same reduction.
"""

import math
from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

_ALIGN: Final = 16
"""Elements: each gradient starts at 64 bytes, so kernels see one alignment in every process."""


class Bucket:
    """All gradients of a replica in one fp32 tensor, and a tail for what else is summed.

    The parameters' ``grad`` are views into it: a backward pass adds straight into the bucket.

    Args:
        parameters: trained fp32 tensors by name.
        tail: number of further values that are summed over the ranks in the same operation.
        world: number of ranks; with 1 nothing is sent.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, tail: int, world: int) -> None:
        offsets, end = {}, 0
        for name in sorted(parameters):
            offsets[name] = end
            end += math.ceil(parameters[name].numel() / _ALIGN) * _ALIGN
        device = next(iter(parameters.values())).device
        self._flat = torch.zeros(end + tail, dtype=torch.float32, device=device)
        self._world = world
        self.gradients = self._flat[:end]
        self.tail = self._flat[end:]
        for name, offset in offsets.items():
            parameter = parameters[name]
            view = self._flat[offset : offset + parameter.numel()].view_as(parameter)
            parameter.grad = view

    def zero(self) -> None:
        """Clear gradients and tail before a backward pass."""
        self._flat.zero_()

    def reduce(self) -> None:
        """Turn the gradients into their mean over the ranks, and the tail into its sum."""
        if self._world > 1:
            dist.all_reduce(self._flat)
            self.gradients.div_(self._world)

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients so that their norm is at most ``limit``; return the norm before.

        The norm is that of the reduced gradients, hence equal on every rank without a message.
        """
        norm: Tensor = torch.linalg.vector_norm(self.gradients)
        self.gradients.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return norm
