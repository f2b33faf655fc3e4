"""Creates the state of an optimizer that has taken no step yet, so that it can be restored.

Optimizers create their state in the first step. A tensor of which each rank has a piece can be
restored only where the piece is known, so a fresh process has to have that state first: one step
with gradients and a learning rate of zero, after which nothing is left of it but the state.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from checkpointing.sharded import is_sharded
from checkpointing.tree import Node, named_leaves


def create_missing(state: Mapping[str, Any], skeleton: Node) -> None:
    """Create the state of the optimizers at the top level that need it for this checkpoint.

    Args:
        state: The live state.
        skeleton: Of the checkpoint.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    saved = dict(zip(skeleton["k"], skeleton["v"], strict=True))
    for key, optimizer in state.items():
        if not isinstance(optimizer, torch.optim.Optimizer) or optimizer.state:
            continue
        kinds = {kind for _, kind in named_leaves(saved.get(key))}
        # What every rank has whole is created by `load_state_dict`.
        if kinds and ("shard" in kinds or any(is_sharded(p) for p in _parameters(optimizer))):
            _step_on_the_spot(optimizer)


def _step_on_the_spot(optimizer: Any) -> None:
    import torch

    parameters = [p for p in _parameters(optimizer) if p.requires_grad]
    kept = [(p, p.grad) for p in parameters]
    # Weights are restored afterwards, but not those that are missing in the checkpoint.
    held = [p.detach().clone() for p in parameters]
    with _learning_rate_of_zero(optimizer), _same_random_numbers():
        try:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step(closure=None)
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
    with torch.no_grad():
        for parameter, value in zip(parameters, held, strict=True):
            parameter.copy_(value)


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def _learning_rate_of_zero(optimizer: Any) -> Iterator[None]:
    import torch

    groups = [group for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]
    for group in groups:
        rate = group["lr"]
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    import torch

    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if is_used else []
    with torch.random.fork_rng(devices=devices):
        yield
