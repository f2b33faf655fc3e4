"""The random number generators of one rank, as a state that can be saved."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jobs.data.order import mix


def seed_everything(seed: int, rank: int) -> None:
    """Seed torch, Python and numpy with streams that differ between ranks."""
    torch.manual_seed(mix(seed, rank, 1) >> 1)
    random.seed(mix(seed, rank, 2))
    np.random.seed(mix(seed, rank, 3) & 0xFFFFFFFF)


class RandomState:
    """The global generators of torch, CUDA (when used), Python and numpy.

    Args:
        device: of the model; the CUDA generator counts only there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Read the generators; tensors, arrays, lists and numbers only."""
        version, internal, gauss = random.getstate()
        _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": {
                "version": version,
                "internal": np.array(internal, dtype=np.uint64),
                "gauss": gauss,
            },
            "numpy": {
                "keys": np.array(keys),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
        }
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators."""
        python, numpy = state["python"], state["numpy"]
        torch.set_rng_state(state["torch"])
        internal = tuple(int(word) for word in python["internal"])
        random.setstate((python["version"], internal, python["gauss"]))
        np.random.set_state(
            (
                "MT19937",
                np.asarray(numpy["keys"], dtype=np.uint32),
                numpy["position"],
                numpy["has_gauss"],
                numpy["cached"],
            )
        )
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self._device)
