from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from jobs.moe.config import PRESETS
from jobs.moe.experts import EXPERTS, group_by_expert
from jobs.moe.model import MoELayer, MoETransformer
from jobs.moe.router import Router, Routing, max_violation

pytestmark = pytest.mark.torch

TINY = PRESETS["tiny"].model


def routing_of(ids, gates, experts):
    return Routing(
        ids_tk=ids, gates_tk=gates, load_e=torch.bincount(ids.flatten(), minlength=experts)
    )


def random_case(tokens=13, dim=6, width=5, experts=4, active=2, used=None, seed=0):
    """Random rows, weights and routing in fp64; only the first `used` experts are chosen."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scores = draw(tokens, used or experts)
    ids = scores.topk(active, dim=-1).indices
    gates = draw(tokens, active).sigmoid()
    return draw(tokens, dim), ids, gates, draw(experts, 2 * width, dim), draw(experts, dim, width)


def naive(x, ids, gates, w1, w2):
    """One token and one expert at a time, as the formula reads."""
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            gate, up = (w1[e] @ x[t]).chunk(2)
            total = total + gates[t, k] * (w2[e] @ (silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def with_gradients(apply, tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = apply(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("name", sorted(EXPERTS))
@pytest.mark.parametrize(
    "case",
    [{}, {"used": 2}, {"active": 1}, {"active": 4}, {"tokens": 1}, {"experts": 16, "tokens": 3}],
    ids=["even", "two experts empty", "one active", "all active", "one token", "mostly empty"],
)
def test_experts_equal_a_loop_over_tokens_in_value_and_gradient(name, case):
    x, ids, gates, w1, w2 = random_case(**case)
    expected = with_gradients(lambda *a: naive(a[0], ids, *a[1:]), (x, gates, w1, w2))
    found = with_gradients(
        lambda x, gates, w1, w2: EXPERTS[name](x, routing_of(ids, gates, len(w1)), w1, w2),
        (x, gates, w1, w2),
    )
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_experts_pass_the_numerical_gradient_check():
    x, ids, gates, w1, w2 = random_case(tokens=4, dim=3, width=2)
    inputs = [tensor.requires_grad_() for tensor in (x, gates, w1, w2)]
    assert torch.autograd.gradcheck(
        lambda x, gates, w1, w2: EXPERTS["plain"](x, routing_of(ids, gates, 4), w1, w2), inputs
    )


def test_empty_expert_gets_a_gradient_of_exactly_zero_and_its_weights_do_not_matter():
    x, ids, gates, w1, w2 = random_case(used=2)
    w1[3], w2[3] = torch.nan, torch.nan
    for weight in (w1, w2):
        weight.requires_grad_()
    out = EXPERTS["plain"](x, routing_of(ids, gates, 4), w1, w2)
    assert out.isfinite().all()
    out.sum().backward()
    for weight in (w1, w2):
        assert (weight.grad[2:] == 0).all()
        assert weight.grad[:2].isfinite().all()


def test_no_token_at_all_gives_an_empty_result_and_zero_gradients():
    _, _, _, w1, w2 = random_case()
    w1.requires_grad_()
    x = torch.zeros(0, 6, dtype=torch.float64, requires_grad=True)
    ids = torch.zeros(0, 2, dtype=torch.int64)
    gates = torch.zeros(0, 2, dtype=torch.float64)
    out = EXPERTS["plain"](x, routing_of(ids, gates, 4), w1, w2)
    out.sum().backward()
    assert out.shape == (0, 6)
    assert (w1.grad == 0).all()


def test_rows_are_grouped_by_expert_in_a_stable_order():
    ids = torch.tensor([[2, 0], [0, 2], [2, 3]])
    grouping = group_by_expert(routing_of(ids, torch.ones(3, 2), 4))
    assert grouping.bounds == (0, 2, 2, 5, 6)
    assert grouping.order_r.tolist() == [1, 2, 0, 3, 4, 5]
    assert grouping.token_r.tolist() == [0, 1, 0, 1, 2, 2]
    assert grouping.order_r[grouping.inverse_r].tolist() == list(range(6))


def test_router_chooses_distinct_experts_and_gates_sum_to_the_scale():
    torch.manual_seed(0)
    router = Router(replace(TINY, gate_scale=2.5))
    torch.nn.init.normal_(router.weight_ed)
    routing = router(torch.randn(50, TINY.dim))
    assert all(len(set(row)) == 2 for row in routing.ids_tk.tolist())
    torch.testing.assert_close(routing.gates_tk.sum(-1), torch.full((50,), 2.5))
    assert int(routing.load_e.sum()) == 100


def test_bias_selects_but_does_not_weigh():
    torch.manual_seed(0)
    router = Router(TINY)
    torch.nn.init.normal_(router.weight_ed)
    x = torch.randn(20, TINY.dim)
    router.bias_e[3] = 10.0
    routing = router(x)
    assert (routing.ids_tk == 3).any(-1).all()
    scores = (x @ router.weight_ed.T).sigmoid().gather(-1, routing.ids_tk)
    torch.testing.assert_close(routing.gates_tk, scores / scores.sum(-1, keepdim=True))


def test_balancing_moves_load_away_from_a_popular_expert():
    torch.manual_seed(0)
    router = Router(replace(TINY, bias_rate=0.01))
    torch.nn.init.normal_(router.weight_ed, std=0.05)
    x = torch.randn(400, TINY.dim) + 4 * router.weight_ed.detach()[0] / 0.05**2 / TINY.dim
    before = max_violation(router(x).load_e)
    for _ in range(200):
        router.balance(router(x).load_e)
    after = max_violation(router(x).load_e)
    assert before > 0.8
    assert after < 0.2
    assert abs(float(router.bias_e.mean())) < 1e-5


def test_bias_is_part_of_the_state_and_takes_no_gradient():
    model = MoETransformer(TINY, max_seq=8, seed=0)
    names = set(model.state_dict())
    assert {f"blocks.{i}.moe.router.bias_e" for i in range(TINY.layers)} <= names
    assert not any("bias_e" in name for name, _ in model.named_parameters())


def test_moe_layer_agrees_with_an_fp64_reference_in_value_and_gradient():
    torch.manual_seed(0)
    layer = MoELayer(TINY, EXPERTS["plain"])
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    x = torch.randn(2, 16, TINY.dim, requires_grad=True)
    out = layer(x)
    out.square().sum().backward()

    w_router, w1, w2 = (
        t.detach().double().requires_grad_() for t in (layer.router.weight_ed, layer.w1, layer.w2)
    )
    x64 = x.detach().double().requires_grad_()
    flat = x64.view(-1, TINY.dim)
    scores = (flat @ w_router.T).sigmoid()
    ids = layer.router(x.detach().view(-1, TINY.dim)).ids_tk
    chosen = scores.gather(-1, ids)
    reference = naive(flat, ids, chosen / chosen.sum(-1, keepdim=True), w1, w2).view_as(x64)
    reference.square().sum().backward()

    pairs = [(out, reference), (x.grad, x64.grad), (layer.w1.grad, w1.grad)]
    pairs += [(layer.w2.grad, w2.grad), (layer.router.weight_ed.grad, w_router.grad)]
    for ours, exact in pairs:
        scale = float(exact.detach().abs().max())
        torch.testing.assert_close(ours.double() / scale, exact / scale, rtol=0, atol=2e-6)
