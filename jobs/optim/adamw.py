"""AdamW in a few multi-tensor operations.

``torch.optim`` is not used: the first construction of one of its optimisers imports
``torch._dynamo`` and what follows (about 900 modules, 2 s on two shared cores), and every rank pays
that again at each restart.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).

    Vectors (norm weights) are not decayed. The state is allocated at once, so a restored state has
    tensors to be copied into before the first step.

    Args:
        parameters: trained tensors by name; the names key the state.
        betas: decay rates of both moments.
        eps: added to the square root of the second moment.
        weight_decay: decay of matrices per step, times the learning rate.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self._names = tuple(sorted(parameters))
        self._parameters = [parameters[name] for name in self._names]
        self._decayed = [p for p in self._parameters if p.ndim >= 2]
        self._first = [torch.zeros_like(p) for p in self._parameters]
        self._second = [torch.zeros_like(p) for p in self._parameters]
        self._betas = betas
        self._eps = eps
        self._weight_decay = weight_decay
        self._steps = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the parameters in place from their ``grad``."""
        self._steps += 1
        beta1, beta2 = self._betas
        gradients = [_gradient(p) for p in self._parameters]
        if self._weight_decay:
            torch._foreach_mul_(self._decayed, 1.0 - lr * self._weight_decay)
        torch._foreach_lerp_(self._first, gradients, 1.0 - beta1)
        torch._foreach_mul_(self._second, beta2)
        torch._foreach_addcmul_(self._second, gradients, gradients, 1.0 - beta2)
        scale = torch._foreach_sqrt(self._second)  # noqa: SLF001 (no public name)
        torch._foreach_div_(scale, math.sqrt(1.0 - beta2**self._steps))
        torch._foreach_add_(scale, self._eps)
        torch._foreach_addcdiv_(
            self._parameters, self._first, scale, -lr / (1.0 - beta1**self._steps)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and both moments by parameter name (not copied)."""
        return {
            "steps": self._steps,
            "first": dict(zip(self._names, self._first, strict=True)),
            "second": dict(zip(self._names, self._second, strict=True)),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy a state into the optimiser's own tensors.

        Raises:
            KeyError: a parameter has no moments in ``state``.
            ValueError: ``state`` names other parameters than this optimiser has.
        """
        for own, key in ((self._first, "first"), (self._second, "second")):
            moments: Mapping[str, Tensor] = state[key]
            if extra := sorted(set(moments) - set(self._names)):
                raise ValueError(f"optimizer state of unknown parameters: {', '.join(extra)}")
            for name, tensor in zip(self._names, own, strict=True):
                tensor.copy_(moments[name])
        self._steps = int(state["steps"])


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter gets a gradient, zeros if unused"
    return parameter.grad
