"""Shapes of the model and the presets of the job. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

BYTE_VOCABULARY: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of one decoder-only mixture-of-experts transformer.

    Raises:
        ValueError: the numbers do not fit together; the message names the field.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    experts: int
    active_experts: int
    expert_dim: int
    """Intermediate width n of one SwiGLU expert; its weights are [2n, dim] and [dim, n]."""
    vocabulary: int = BYTE_VOCABULARY
    tied_embeddings: bool = False
    rope_theta: float = 10_000.0
    gate_scale: float = 1.0
    bias_rate: float = 1e-3
    """Step u of the balancing bias, b += u * sign(mean load - load)."""
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim} must be even for rotary embeddings")
        if not 1 <= self.active_experts <= self.experts:
            raise ValueError(
                f"active_experts {self.active_experts} must lie in 1..experts ({self.experts})"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model with the training numbers that suit it; flags override the numbers."""

    model: ModelConfig
    batch: int
    """Sequences of one rank in one step."""
    seq: int
    lr: float
    steps: int
    warmup: int


PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        # About 1.05 M parameters, 0.45 M of them active for a token.
        "demo": Preset(
            model=ModelConfig(
                dim=128,
                layers=4,
                heads=4,
                kv_heads=2,
                experts=8,
                active_experts=2,
                expert_dim=64,
                bias_rate=1e-2,
            ),
            batch=2,
            seq=64,
            lr=3e-3,
            steps=300,
            warmup=20,
        ),
        # For tests: a step takes a few milliseconds.
        "tiny": Preset(
            model=ModelConfig(
                dim=32,
                layers=2,
                heads=4,
                kv_heads=2,
                experts=4,
                active_experts=2,
                expert_dim=16,
                bias_rate=1e-2,
                tied_embeddings=True,
            ),
            batch=2,
            seq=32,
            lr=1e-2,
            steps=40,
            warmup=4,
        ),
    }
)
