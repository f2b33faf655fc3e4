"""Top-k token-choice router with aux-loss-free balancing.

Selection uses score + bias, the gate only the score, so the bias moves load between experts without
adding a gradient of its own (Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437).

Shapes: T tokens, D model width, E experts, K active experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (the usual name)

from jobs.moe.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where the tokens of one layer go.

    Attributes:
        ids_tk: chosen expert of each token, int64, K distinct ones in a row.
        gates_tk: their weights; a row sums to the gate scale.
        load_e: tokens that chose each expert, int64, on this rank only.
    """

    ids_tk: Tensor
    gates_tk: Tensor
    load_e: Tensor


class Router(nn.Module):
    """Choose K of E experts for each token.

    The bias is a persistent buffer: a resume without it would route differently.
    """

    bias_e: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._num_experts = config.experts
        self._active = config.active_experts
        self._gate_scale = config.gate_scale
        self._bias_rate = config.bias_rate
        self.weight_ed = nn.Parameter(torch.empty(config.experts, config.dim))
        self.register_buffer("bias_e", torch.zeros(config.experts, dtype=torch.float32))

    def forward(self, x_td: Tensor) -> Routing:
        """Route the tokens of one rank."""
        scores_te = F.linear(x_td, self.weight_ed).sigmoid()
        with torch.no_grad():
            ids_tk = (scores_te + self.bias_e).topk(self._active, dim=-1, sorted=True).indices
            load_e = torch.bincount(ids_tk.flatten(), minlength=self._num_experts)
        gates_tk = scores_te.gather(-1, ids_tk)
        gates_tk = gates_tk * (self._gate_scale / gates_tk.sum(-1, keepdim=True))
        return Routing(ids_tk=ids_tk, gates_tk=gates_tk, load_e=load_e)

    @torch.no_grad()
    def balance(self, load_e: Tensor) -> None:
        """Move the bias against the load of the last step.

        Args:
            load_e: tokens that chose each expert, summed over ALL ranks. With a rank's own load the
                replicas would drift apart.
        """
        load_e = load_e.to(self.bias_e.dtype)
        delta_e = torch.sign(load_e.mean() - load_e)
        # Only differences between the biases select; the mean is kept at zero so that they do not
        # drift away together over a long run.
        delta_e -= delta_e.mean()
        self.bias_e.add_(delta_e, alpha=self._bias_rate)


def max_violation(load_e: Tensor) -> float:
    """How far the busiest expert lies above the mean load, as a fraction (0 is balanced)."""
    load_e = load_e.float()
    mean = float(load_e.mean())
    return float(load_e.max()) / mean - 1.0 if mean > 0 else 0.0
