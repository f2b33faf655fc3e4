"""Which tensors change in an optimizer's step only, and the hooks that come before it."""

from collections.abc import Callable, Mapping
from typing import Any

from checkpointing import leaves as leaf_bytes


class Guards:
    """Optimizers whose steps wait for a copy that still runs.

    Args:
        fence: Called before each of their steps.
    """

    def __init__(self, fence: Callable[[], None]) -> None:
        self._fence = fence
        self._optimizers: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    def add(self, optimizer: Any) -> None:
        """Register the hook; again does nothing."""
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            optimizer.register_step_pre_hook(lambda *_: self._fence())

    def find(self, state: Mapping[str, Any]) -> None:
        """Add the optimizers that a state names at its top level."""
        for value in state.values():
            if hasattr(value, "register_step_pre_hook") and hasattr(value, "param_groups"):
                self.add(value)

    def addresses(self) -> set[int]:
        """Return where the parameters and the states of these optimizers lie."""
        found: set[int] = set()
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                found.update(leaf_bytes.plain(p).data_ptr() for p in group["params"])
            for state in optimizer.state.values():
                values = state.values() if isinstance(state, Mapping) else ()
                found.update(
                    leaf_bytes.plain(value).data_ptr()
                    for value in values
                    if leaf_bytes.is_tensor(value)
                )
        found.discard(0)  # what has no elements has no address
        return found
