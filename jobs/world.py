"""Where this rank stands: torchrun's environment and the process group. torch is loaded on join."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import UsageError

if TYPE_CHECKING:
    import torch

_COLLECTIVE_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The environment of a rank; a process without one is a world of its own."""

    rank: int
    local_rank: int
    size: int
    attempt: int
    output: Path
    collective_timeout_s: float

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "World":
        """Read the environment that torchrun or everstep sets.

        Raises:
            UsageError: a variable that must be a number is none.
        """
        # A collective waits longer than a step may last, so that a hang is judged by the one who
        # watches the steps and not by whichever rank's timer ends first.
        step_timeout_s = _number(environ, "EVERSTEP_STEP_TIMEOUT_S", 0.0)
        return cls(
            rank=int(_number(environ, "RANK", 0)),
            local_rank=int(_number(environ, "LOCAL_RANK", 0)),
            size=int(_number(environ, "WORLD_SIZE", 1)),
            attempt=int(_number(environ, "EVERSTEP_ATTEMPT", 1)),
            output=Path(environ.get("EVERSTEP_OUTPUT", "moe-out")),
            collective_timeout_s=max(_COLLECTIVE_TIMEOUT_S, 2 * step_timeout_s),
        )

    @contextmanager
    def join(self, backend: str) -> "Iterator[torch.device]":
        """Join the process group and give the device of this rank.

        Args:
            backend: ``gloo``, ``nccl``, or ``auto`` for NCCL where there is a GPU.
        """
        import torch  # mistakes in flags and data are told without it

        if backend == "auto":
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        device = torch.device("cpu")
        if backend == "nccl":
            if not torch.cuda.is_available():
                raise UsageError("--backend nccl: no CUDA GPU is visible; use --backend gloo")
            device = torch.device("cuda", self.local_rank)
            _make_cuda_deterministic(device)
        if self.size > 1:
            torch.distributed.init_process_group(
                backend,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.collective_timeout_s),
            )
        yield device
        # Not in a finally: after a failed collective the destruction itself may wait for a peer.
        if self.size > 1:
            torch.distributed.destroy_process_group()


def _make_cuda_deterministic(device: "torch.device") -> None:
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(device)
    deterministic: Any = torch.utils.deterministic
    deterministic.fill_uninitialized_memory = False  # nothing here reads memory it never wrote
    # The same switch as use_deterministic_algorithms(True), which would import torch._inductor.
    torch.set_deterministic_debug_mode("error")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"environment variable {name}={text!r} is not a number") from None
