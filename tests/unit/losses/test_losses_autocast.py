"""Losses and their backward pass under torch.autocast, with fp32 master weights."""

import pytest
import torch
from loss_cases import make_case

from megatron_kd.losses import fused_chunked_kd_loss, fused_online_kd_loss


def leaves(case):
    return [
        x.to(torch.float32, copy=True).requires_grad_()
        for x in (case.hidden, case.weight, case.bias)
    ]


def loss_of(case, online, gradient, hidden, weight, bias):
    options = dict(bias=bias, gradient=gradient, token_weights=torch.ones(7, 2), chunk_size=3)
    if online:
        return fused_online_kd_loss(hidden, weight, hidden.detach() * 2, weight.detach(), **options)
    return fused_chunked_kd_loss(hidden, weight, case.target, **options)


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
@pytest.mark.parametrize("online", [False, True])
def test_products_in_autocasts_dtype_and_gradients_in_the_weights_own(online, gradient):
    case = make_case()
    hidden, weight, bias = leaves(case)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(case, online, gradient, hidden, weight, bias)
    loss.sum().backward()
    half = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    want = loss_of(case, online, gradient, *half)
    want.sum().backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want)
    for x, y in zip((hidden, weight, bias), half, strict=True):
        assert x.grad.dtype == torch.float32
        torch.testing.assert_close(x.grad.bfloat16(), y.grad, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
@pytest.mark.parametrize("online", [False, True])
def test_a_backward_pass_inside_autocast_keeps_the_products_of_the_forward_pass(online, gradient):
    """The dtype of a loss is settled in its forward pass, wherever backward() is called."""
    case = make_case()
    inside, outside = leaves(case), leaves(case)
    loss = loss_of(case, online, gradient, *inside)
    with torch.autocast("cpu", torch.bfloat16):
        loss.sum().backward()
    loss_of(case, online, gradient, *outside).sum().backward()
    for x, y in zip(inside, outside, strict=True):
        assert torch.equal(x.grad, y.grad)
