"""SwiGLU experts: the interface, and one implementation in plain PyTorch.

Shapes: T tokens, D model width, N expert width, E experts, K active experts, R = T * K rows.
Weights: ``w1`` [E, 2N, D] with the gate's N rows before the N rows of the up projection (not
interleaved), ``w2`` [E, D, N]. A checkpoint holds them in this layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the usual name)

from jobs.moe.router import Routing


class Experts(Protocol):
    """Apply the chosen experts to each token; kernels implement this one call."""

    def __call__(self, x_td: Tensor, routing: Routing, w1: Tensor, w2: Tensor) -> Tensor:
        """Return the gate-weighted sum of the experts' outputs, [T, D].

        It is differentiable in ``x_td``, the gates and both weights. An expert without tokens gets
        a gradient of zeros (never none, so that every rank reduces the same tensors), no token at
        all gives an empty result, and nothing is summed in an order that varies between runs.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Rows (token, choice) sorted by expert; the sort is stable, hence the order is fixed.

    Attributes:
        token_r: token of each sorted row.
        order_r: flat index t * K + k of each sorted row.
        inverse_r: sorted row of each flat index.
        bounds: E + 1 row numbers; expert e owns rows bounds[e] to bounds[e + 1].
    """

    token_r: Tensor
    order_r: Tensor
    inverse_r: Tensor
    bounds: tuple[int, ...]


def group_by_expert(routing: Routing) -> Grouping:
    """Sort the rows of a routing by expert."""
    active = routing.ids_tk.shape[-1]
    order_r = torch.argsort(routing.ids_tk.flatten(), stable=True)
    inverse_r = torch.empty_like(order_r)
    inverse_r[order_r] = torch.arange(order_r.numel(), device=order_r.device)
    bounds = [0]
    for count in routing.load_e.tolist():
        bounds.append(bounds[-1] + int(count))
    return Grouping(
        token_r=torch.div(order_r, active, rounding_mode="floor"),
        order_r=order_r,
        inverse_r=inverse_r,
        bounds=tuple(bounds),
    )


class _GroupedSwiGLU(torch.autograd.Function):
    """One dense product per expert on contiguous rows, with a hand-written backward.

    The gate's gradient is <dA', A> with dA' = dO W2 (Guo et al., SonicMoE, arXiv 2512.14080): it
    equals <dO, Y> but needs neither Y nor its gradient, so only X and the pre-activations are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x_td: Tensor, gates_tk: Tensor, w1: Tensor, w2: Tensor, grouping: Grouping
    ) -> Tensor:
        xs_rd = x_td.index_select(0, grouping.token_r)
        h_rn = xs_rd.new_empty(xs_rd.shape[0], w1.shape[1])
        _each_expert(grouping, xs_rd, w1.mT, h_rn)
        gate_rn, up_rn = h_rn.chunk(2, dim=-1)
        y_rd = torch.empty_like(xs_rd)
        _each_expert(grouping, F.silu(gate_rn).mul_(up_rn), w2.mT, y_rd)
        ctx.save_for_backward(x_td, gates_tk, w1, w2, h_rn)
        ctx.grouping = grouping
        y_tkd = y_rd.index_select(0, grouping.inverse_r).view(*gates_tk.shape, x_td.shape[-1])
        return torch.einsum("tkd,tk->td", y_tkd, gates_tk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        x_td, gates_tk, w1, w2, h_rn = ctx.saved_tensors
        grouping: Grouping = ctx.grouping
        do_rd = grads[0].index_select(0, grouping.token_r)
        gate_rn, up_rn = h_rn.chunk(2, dim=-1)
        sigmoid_rn = gate_rn.sigmoid()
        silu_rn = gate_rn * sigmoid_rn
        a_rn = silu_rn * up_rn
        da_rn = torch.empty_like(a_rn)
        _each_expert(grouping, do_rd, w2, da_rn)
        dgates_r = (da_rn * a_rn).sum(-1)
        gates_r1 = gates_tk.flatten().index_select(0, grouping.order_r).unsqueeze(-1)
        dw2 = _each_weight(grouping, do_rd, a_rn.mul_(gates_r1), w2)
        da_rn.mul_(gates_r1)
        dh_rn = torch.cat(
            (
                da_rn * up_rn * (sigmoid_rn + silu_rn * (1 - sigmoid_rn)),
                da_rn * silu_rn,
            ),
            dim=-1,
        )
        dw1 = _each_weight(grouping, dh_rn, x_td.index_select(0, grouping.token_r), w1)
        dx_rd = torch.empty_like(do_rd)
        _each_expert(grouping, dh_rn, w1, dx_rd)
        # Gathering by the inverse permutation and summing over K replaces an index_add, which on
        # CUDA would add atomically and in no fixed order.
        dx_tkd = dx_rd.index_select(0, grouping.inverse_r).view(*gates_tk.shape, x_td.shape[-1])
        dx_td = dx_tkd.sum(1)
        dgates_tk = dgates_r.index_select(0, grouping.inverse_r).view_as(gates_tk)
        return dx_td, dgates_tk, dw1, dw2, None


def _each_expert(grouping: Grouping, rows: Tensor, weights: Tensor, out: Tensor) -> None:
    """Multiply each expert's rows by its matrix into ``out``; experts without rows are skipped."""
    for e, matrix in enumerate(weights.unbind(0)):
        lo, hi = grouping.bounds[e], grouping.bounds[e + 1]
        if hi > lo:
            torch.mm(rows[lo:hi], matrix, out=out[lo:hi])


def _each_weight(grouping: Grouping, left: Tensor, right: Tensor, like: Tensor) -> Tensor:
    """Gradient left^T right of each expert's matrix; zeros where an expert has no rows."""
    grad = torch.empty_like(like)
    for e, matrix in enumerate(grad.unbind(0)):
        lo, hi = grouping.bounds[e], grouping.bounds[e + 1]
        if hi > lo:
            torch.mm(left[lo:hi].mT, right[lo:hi], out=matrix)
        else:
            matrix.zero_()
    return grad


def plain_experts(x_td: Tensor, routing: Routing, w1: Tensor, w2: Tensor) -> Tensor:
    """The experts in plain PyTorch; see :class:`Experts`."""
    out = _GroupedSwiGLU.apply(  # type: ignore[no-untyped-call]
        x_td, routing.gates_tk, w1, w2, group_by_expert(routing)
    )
    return cast("Tensor", out)


EXPERTS: Final[Mapping[str, Experts]] = MappingProxyType({"plain": plain_experts})
"""Implementations by name."""
