"""Losses at the edges of what they are given: no batch, a second backward pass, wrong rows."""

import numpy as np
import pytest
import torch
from loss_cases import make_case

from megatron_kd.losses import (
    Divergence,
    TopKTarget,
    dense_kd_loss,
    dense_online_kd_loss,
    fused_chunked_kd_loss,
    fused_online_kd_loss,
    sparse_chunked_kd_loss,
)

MIXED = Divergence(ce_weight=0.25)
MODES = ("recompute", "in_forward")


def logits_of(hidden, weight):
    return hidden @ weight.T


def losses_of(case, divergence, *, mask=None):
    """Every loss as a function of (hidden, weight), by name."""
    labels, target = case.labels, case.target
    common = dict(divergence=divergence, labels=labels)

    def teacher(hidden, weight):
        return hidden.detach() * 2, weight.detach()

    def dense(hidden, weight):
        return dense_kd_loss(logits_of(hidden, weight), target, **common)

    def sparse(hidden, weight):
        return sparse_chunked_kd_loss(logits_of(hidden, weight), target, chunk_size=3, **common)

    def dense_online(hidden, weight):
        of_teacher = logits_of(*teacher(hidden, weight))
        return dense_online_kd_loss(logits_of(hidden, weight), of_teacher, **common)

    def fused(gradient, online):
        def call(hidden, weight):
            rest = dict(common, gradient=gradient, token_weights=mask, chunk_size=3)
            if online:
                return fused_online_kd_loss(hidden, weight, *teacher(hidden, weight), **rest)
            return fused_chunked_kd_loss(hidden, weight, target, **rest)

        return call

    found = {"dense": dense, "sparse": sparse, "dense_online": dense_online}
    found |= {f"fused {mode}": fused(mode, False) for mode in MODES}
    found |= {f"fused_online {mode}": fused(mode, True) for mode in MODES}
    return found


NAMES = tuple(losses_of(make_case(), MIXED))


@pytest.mark.parametrize("name", NAMES)
def test_no_batch_is_no_loss_and_no_gradient(name):
    """As the last micro-batch of a rank may be; [3, 0, h]."""
    hidden = torch.zeros(3, 0, 5, requires_grad=True)
    weight = torch.randn(11, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    case = make_case()
    case.target = TopKTarget(torch.zeros(3, 0, 4, dtype=torch.int64), torch.zeros(3, 0, 4))
    case.labels = torch.zeros(3, 0, dtype=torch.int64)
    loss = losses_of(case, MIXED, mask=torch.ones(3, 0))[name](hidden, weight)
    assert loss.shape == (3, 0)
    loss.sum().backward()
    assert hidden.grad.shape == (3, 0, 5)
    assert torch.equal(weight.grad, torch.zeros(11, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in NAMES if "in_forward" not in name])
def test_a_second_backward_pass_gives_the_gradient_of_its_own_upstream(name, dtype):
    case = make_case(bias=False)
    hidden = case.hidden.to(dtype).requires_grad_()
    weight = case.weight.to(dtype).requires_grad_()
    loss = losses_of(case, MIXED)[name](hidden, weight)
    make = torch.Generator().manual_seed(3)
    first, second = (torch.rand(loss.shape, generator=make, dtype=loss.dtype) for _ in range(2))
    second[1] = 0
    once = torch.autograd.grad(loss, (hidden, weight), first, retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight), first, retain_graph=True)
    other = torch.autograd.grad(loss, (hidden, weight), second)
    fresh = losses_of(case, MIXED)[name](hidden, weight)
    want = torch.autograd.grad(fresh, (hidden, weight), second)
    for a, b, c, d in zip(once, again, other, want, strict=True):
        assert torch.equal(a, b) and torch.equal(c, d)


@pytest.mark.parametrize("name", [name for name in NAMES if "in_forward" in name])
def test_a_second_backward_pass_of_stored_gradients_is_refused(name):
    case = make_case(bias=False)
    hidden, weight = case.hidden.float().requires_grad_(), case.weight.float().requires_grad_()
    loss = losses_of(case, MIXED, mask=torch.ones(7, 2))[name](hidden, weight).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="use gradient recompute"):
        loss.backward()


@pytest.mark.parametrize("weighted", ["mask", "random"])
@pytest.mark.parametrize("online", [False, True])
def test_rows_off_the_index_do_not_matter_upstream(online, weighted):
    """Their loss is zero, so the plain sum of all losses is the masked sum."""
    case = make_case(bias=False)
    mask = torch.tensor([True, False, True, True, False, True, False, False, True, True, True])
    mask = torch.cat([mask, torch.tensor([False, True, True])]).view(7, 2)
    index = mask.flatten().nonzero().flatten()
    weights = mask.float() if weighted == "mask" else case.token_weights + 1
    gradients = []
    for gradient in MODES:
        hidden, weight = case.hidden.float().requires_grad_(), case.weight.float().requires_grad_()
        rest = dict(gradient=gradient, token_weights=weights, supervised_index=index, chunk_size=2)
        if online:
            teacher = (hidden.detach() * 2, weight.detach())
            loss = fused_online_kd_loss(hidden, weight, *teacher, **rest)
        else:
            loss = fused_chunked_kd_loss(hidden, weight, case.target, **rest)
        upstream = torch.where(mask, weights, torch.full_like(weights, 3.0)) * 1.5
        loss.backward(upstream if weighted == "random" else torch.full_like(loss, 1.5))
        assert (loss[~mask] == 0).all()
        gradients.append((hidden.grad, weight.grad))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert b.abs().sum() > 0


def test_arrays_are_refused_with_the_remedy():
    ids, logprobs = np.zeros((2, 1, 3), np.int64), np.zeros((2, 1, 3), np.float32)
    with pytest.raises(ValueError, match="TopKTarget.ids wants a torch.Tensor, got ndarray"):
        TopKTarget(ids, logprobs)
    with pytest.raises(ValueError, match="log_z_tau wants a torch.Tensor, got ndarray"):
        TopKTarget(torch.from_numpy(ids), torch.from_numpy(logprobs), np.zeros((2, 1)))


@pytest.mark.parametrize("name", ["dense", "sparse", "fused recompute"])
def test_a_token_named_twice_is_refused(name):
    case = make_case(bias=False)
    ids = case.target.ids.clone()
    ids[4, 1, 5] = ids[4, 1, 2]
    case.target = TopKTarget(ids, case.target.logprobs)
    loss = losses_of(case, Divergence())[name]
    with pytest.raises(ValueError, match=rf"token {int(ids[4, 1, 2])} twice at position s 4, b 1"):
        loss(case.hidden.float(), case.weight.float())
    unused = case.target.logprobs.clone()
    unused[4, 1, 5] = float("-inf")
    case.target = TopKTarget(ids, unused)
    assert torch.isfinite(losses_of(case, Divergence())[name](case.hidden, case.weight)).all()
