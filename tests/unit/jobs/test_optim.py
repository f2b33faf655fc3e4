import copy
from itertools import pairwise

import pytest
import torch

from jobs.moe.parallel import Bucket
from jobs.optim.adamw import AdamW
from jobs.optim.schedule import Schedule, ScheduleKind

pytestmark = pytest.mark.torch


def parameters(seed=0):
    torch.manual_seed(seed)
    return {"w": torch.randn(4, 3), "norm": torch.randn(5), "e": torch.randn(2, 3, 4)}


def gradient(parameter, step):
    return torch.sin(parameter.detach() * (step + 1)) + 0.1


def set_gradients(params, step):
    for parameter in params.values():
        parameter.grad = gradient(parameter, step)


def test_adamw_equals_the_one_of_torch_over_several_steps():
    ours = parameters()
    theirs = {name: tensor.clone().requires_grad_() for name, tensor in ours.items()}
    own = AdamW(ours, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["w"], theirs["e"]], "weight_decay": 0.1},
            {"params": [theirs["norm"]], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    for step in range(8):
        lr = 0.01 * (step + 1)
        for params in (ours, theirs):
            set_gradients(params, step)
        for group in reference.param_groups:
            group["lr"] = lr
        own.step(lr)
        reference.step()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name].detach(), rtol=1e-6, atol=1e-7)


def test_optimizer_continues_bit_for_bit_after_a_state_round_trip():
    params = parameters()
    whole = AdamW(params)
    for step in range(3):
        set_gradients(params, step)
        whole.step(0.01)
    state, resumed_params = copy.deepcopy(whole.state_dict()), copy.deepcopy(params)
    resumed = AdamW(resumed_params)
    resumed.load_state_dict(state)
    for step in range(3, 6):
        for optimizer, own in ((whole, params), (resumed, resumed_params)):
            set_gradients(own, step)
            optimizer.step(0.01)
    assert all(torch.equal(params[name], resumed_params[name]) for name in params)


def test_state_of_other_parameters_is_refused():
    optimizer = AdamW(parameters())
    state = optimizer.state_dict()
    state["first"]["stranger"] = torch.zeros(1)
    with pytest.raises(ValueError, match="stranger"):
        optimizer.load_state_dict(state)


def test_bucket_holds_the_gradients_of_a_backward_pass_at_aligned_places():
    params = {name: tensor.requires_grad_() for name, tensor in parameters().items()}
    bucket = Bucket(params, tail=2, world=1)
    (params["w"].sum() * 3 + params["norm"].sum()).backward()
    assert float(bucket.gradients.sum()) == 3 * 12 + 5
    assert float(bucket.tail.abs().sum()) == 0
    for parameter in params.values():
        assert parameter.grad.data_ptr() % 64 == bucket.gradients.data_ptr() % 64
    bucket.zero()
    assert all(float(p.grad.abs().sum()) == 0 for p in params.values())


def test_clipping_equals_the_one_of_torch():
    params = {name: tensor.requires_grad_() for name, tensor in parameters().items()}
    others = {name: tensor.detach().clone().requires_grad_() for name, tensor in params.items()}
    bucket = Bucket(params, tail=1, world=1)
    for own in (params, others):
        sum((tensor**2).sum() for tensor in own.values()).backward()
    norm = bucket.clip(0.5)
    expected = torch.nn.utils.clip_grad_norm_(list(others.values()), 0.5)
    torch.testing.assert_close(norm, expected)
    for name in params:
        torch.testing.assert_close(params[name].grad, others[name].grad)
    before = bucket.gradients.clone()
    bucket.clip(10.0)
    assert torch.equal(bucket.gradients, before)


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_schedule_warms_up_peaks_and_ends_at_the_floor(kind):
    schedule = Schedule(kind=kind, peak=1.0, steps=100, warmup=10)
    rates = [schedule.lr(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=1e-3)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert schedule.lr(500) == pytest.approx(0.1)


def test_wsd_rates_before_the_decay_do_not_depend_on_the_length():
    short = Schedule(kind=ScheduleKind.WSD, peak=1.0, steps=100, warmup=10)
    longer = Schedule(kind=ScheduleKind.WSD, peak=1.0, steps=1000, warmup=10)
    assert [short.lr(s) for s in range(80)] == [longer.lr(s) for s in range(80)]
