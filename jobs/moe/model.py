"""The mixture-of-experts transformer."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from jobs.moe.attention import Attention, RMSNorm, RotaryTable
from jobs.moe.config import ModelConfig
from jobs.moe.experts import Experts, plain_experts
from jobs.moe.router import Router


class MoELayer(nn.Module):
    """Router and experts of one layer.

    Attributes:
        load_e: tokens that chose each expert in the last forward pass, on this rank.
    """

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.router = Router(config)
        self.w1 = nn.Parameter(torch.empty(config.experts, 2 * config.expert_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.dim, config.expert_dim))
        self.load_e = torch.zeros(config.experts, dtype=torch.int64)
        self._experts = experts

    def forward(self, x_bsd: Tensor) -> Tensor:
        """Send each token through its experts."""
        x_td = x_bsd.reshape(-1, x_bsd.shape[-1])
        routing = self.router(x_td)
        self.load_e = routing.load_e
        return self._experts(x_td, routing, self.w1, self.w2).view_as(x_bsd)


class Block(nn.Module):
    """Attention, then experts, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.dim, config.norm_eps)
        self.moe = MoELayer(config, experts)

    def forward(self, x_bsd: Tensor, rotary: RotaryTable) -> Tensor:
        """Apply the block."""
        x_bsd = x_bsd + self.attention(self.attention_norm(x_bsd), rotary)
        out: Tensor = x_bsd + self.moe(self.moe_norm(x_bsd))
        return out


class MoETransformer(nn.Module):
    """Decoder-only transformer whose every layer routes to experts.

    Args:
        config: its shape.
        max_seq: longest sequence it will see.
        seed: of the initial weights; they are drawn on the CPU from a generator of their own, so
            they depend on nothing else.
        experts: implementation of the experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_seq: int,
        seed: int,
        experts: Experts = plain_experts,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, experts) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        self.rotary = RotaryTable(config.head_dim, max_seq, config.rope_theta)
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Projections that end on the residual path are scaled down with its number of additions.
        residual_scale = 1 / math.sqrt(2 * self.config.layers)
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                continue
            std = 1 / math.sqrt(self.config.dim)
            if name.startswith(("embedding", "head")):
                std = 0.02
            elif name.endswith("w2"):
                std = residual_scale / math.sqrt(self.config.expert_dim)
            elif name.endswith("out.weight"):
                std *= residual_scale
            weight.normal_(0.0, std, generator=generator)

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """Return the logits of the next token, [B, S, vocabulary]."""
        x_bsd = self.embedding(tokens_bs)
        for block in self.blocks:
            x_bsd = block(x_bsd, self.rotary)
        logits: Tensor = self.head(self.norm(x_bsd))
        return logits

    def loss(self, tokens_bs: Tensor, targets_bs: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per token."""
        logits = self(tokens_bs)
        return F.cross_entropy(logits.flatten(0, 1), targets_bs.flatten())

    def moe_layers(self) -> Iterator[MoELayer]:
        """The expert layers, first to last."""
        for block in self.blocks:
            if isinstance(block, Block):
                yield block.moe

    def expert_load(self) -> Tensor:
        """Tokens per layer and expert in the last forward pass of this rank, [L, E]."""
        return torch.stack([layer.load_e for layer in self.moe_layers()])

    def balance(self, load_le: Tensor) -> None:
        """Update every router's bias from the load summed over all ranks."""
        for layer, load_e in zip(self.moe_layers(), load_le, strict=True):
            layer.router.balance(load_e)
