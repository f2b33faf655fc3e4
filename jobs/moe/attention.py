"""RMSNorm, rotary embeddings and grouped-query attention.

Shapes: B sequences, S positions, D model width, H query heads, G key/value heads, C head width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from jobs.moe.config import ModelConfig


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, times a learned weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class RotaryTable(nn.Module):
    """Cosines and sines of the rotary embedding for up to ``max_seq`` positions."""

    cos_sc: Tensor
    sin_sc: Tensor

    def __init__(self, head_dim: int, max_seq: int, theta: float) -> None:
        super().__init__()
        # In float64 and on the CPU: the table must not depend on the device that trains.
        rates = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(max_seq, dtype=torch.float64), rates)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_sc", angles.cos().float(), persistent=False)
        self.register_buffer("sin_sc", angles.sin().float(), persistent=False)

    def forward(self, x_bhsc: Tensor) -> Tensor:
        """Rotate the pairs (i, i + C/2) of each head by the angle of its position."""
        seq = x_bhsc.shape[-2]
        left, right = x_bhsc.chunk(2, dim=-1)
        turned = torch.cat((-right, left), dim=-1)
        return x_bhsc * self.cos_sc[:seq] + turned * self.sin_sc[:seq]


class Attention(nn.Module):
    """Causal grouped-query attention with one fused projection for queries, keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._heads = config.heads
        self._kv_heads = config.kv_heads
        self._head_dim = config.head_dim
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.dim, width, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_bsd: Tensor, rotary: RotaryTable) -> Tensor:
        """Mix positions; each sees itself and what lies before it."""
        batch, seq, dim = x_bsd.shape
        qkv = self.qkv(x_bsd).view(batch, seq, -1, self._head_dim).transpose(1, 2)
        rotated = self._heads + self._kv_heads
        turned = rotary(qkv[:, :rotated])
        mixed = F.scaled_dot_product_attention(
            turned[:, : self._heads],
            turned[:, self._heads :],
            qkv[:, rotated:],
            is_causal=True,
            enable_gqa=self._kv_heads != self._heads,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return out
