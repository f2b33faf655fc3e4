from dataclasses import replace

import pytest
import torch

from jobs.moe.attention import Attention, RMSNorm, RotaryTable
from jobs.moe.config import PRESETS, ModelConfig
from jobs.moe.model import MoETransformer

pytestmark = pytest.mark.torch

TINY = PRESETS["tiny"].model


def test_demo_preset_has_one_to_two_million_parameters():
    model = MoETransformer(PRESETS["demo"].model, max_seq=8, seed=0)
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 2e6


def test_later_tokens_do_not_change_earlier_logits():
    model = MoETransformer(TINY, max_seq=16, seed=0)
    tokens = torch.arange(16).view(1, 16)
    changed = tokens.clone()
    changed[0, 10:] = 99
    first, second = model(tokens), model(changed)
    torch.testing.assert_close(first[:, :10], second[:, :10])
    assert not torch.allclose(first[:, 10:], second[:, 10:])


def test_attention_depends_on_relative_positions_only():
    rotary = RotaryTable(8, 32, 10_000.0)
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    q, k = (rotary(x.expand(1, 1, 32, 8)) for x in (query, key))
    scores = q[0, 0] @ k[0, 0].T
    torch.testing.assert_close(scores[5, 2], scores[20, 17], rtol=1e-4, atol=1e-4)


def test_grouped_queries_equal_repeated_keys_and_values():
    torch.manual_seed(0)
    attention = Attention(TINY)
    full = Attention(replace(TINY, kv_heads=TINY.heads))
    heads, kv, width = TINY.heads, TINY.kv_heads, TINY.head_dim
    q, k, v = attention.qkv.weight.detach().split([heads * width, kv * width, kv * width])
    repeat = [w.view(kv, width, -1).repeat_interleave(heads // kv, 0).flatten(0, 1) for w in (k, v)]
    full.load_state_dict(
        {"qkv.weight": torch.cat([q, *repeat]), "out.weight": attention.out.weight}
    )
    x = torch.randn(2, 7, TINY.dim)
    rotary = RotaryTable(width, 7, 10_000.0)
    torch.testing.assert_close(attention(x, rotary), full(x, rotary))


def test_rms_norm_gives_unit_root_mean_square():
    out = RMSNorm(16, 1e-6)(torch.randn(4, 16) * 7)
    torch.testing.assert_close(out.square().mean(-1), torch.ones(4), rtol=1e-4, atol=1e-4)


def test_tied_embeddings_share_one_tensor_and_untied_do_not():
    tied = MoETransformer(TINY, max_seq=8, seed=0)
    untied = MoETransformer(replace(TINY, tied_embeddings=False), max_seq=8, seed=0)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(123)
    first = MoETransformer(TINY, max_seq=8, seed=5).state_dict()
    torch.manual_seed(456)
    second = MoETransformer(TINY, max_seq=8, seed=5).state_dict()
    other = MoETransformer(TINY, max_seq=8, seed=6).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"heads": 5}, "heads"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"active_experts": 9}, "active_experts"),
        ({"dim": 36, "heads": 4, "kv_heads": 4}, "head size"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changed, named):
    good = {
        "dim": 32, "layers": 1, "heads": 4, "kv_heads": 2,
        "experts": 4, "active_experts": 2, "expert_dim": 8,
    }  # fmt: skip
    with pytest.raises(ValueError, match=named):
        ModelConfig(**{**good, **changed})
