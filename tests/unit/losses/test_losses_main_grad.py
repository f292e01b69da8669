"""Where the weight's gradient goes: the host's main_grad, autograd, and sums in fp32."""

import pytest
import torch
from loss_cases import make_case, plain, run

from megatron_kd.losses import (
    dense_kd_loss,
    fused_chunked_kd_loss,
    fused_cross_entropy,
)


def leaves(case, dtype=torch.float32):
    return [x.to(dtype, copy=True).requires_grad_() for x in (case.hidden, case.weight, case.bias)]


def fused(case, hidden, weight, bias=None, **options):
    return fused_chunked_kd_loss(
        hidden, weight, case.target, **dict(dict(bias=bias, chunk_size=4), **options)
    )


def as_parameter(weight, dtype=torch.float32):
    """A weight as Megatron's DDP wrapper leaves it."""
    weight = torch.nn.Parameter(weight.to(dtype))
    weight.main_grad = buffer = torch.full(weight.shape, 0.5, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    return weight, buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_out", [False, True])
@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
def test_main_grad(gradient, zero_out, dtype):
    """Added to what main_grad holds; autograd gets a dummy, zero where the host asks."""
    case = make_case(padding=3, vocab=56)
    hidden = case.hidden.to(dtype)
    weight, buffer = as_parameter(case.weight, dtype)
    weight.zero_out_wgrad = zero_out
    loss = fused(
        case,
        hidden,
        weight,
        gradient=gradient,
        token_weights=torch.ones(7, 2),
        vocab_size=53,
        gradient_accumulation_fusion=True,
    )
    (loss.sum() * 3).backward()
    reference = case.weight.to(dtype, copy=True).requires_grad_()
    (fused(case, hidden, reference, vocab_size=53).sum() * 3).backward()
    assert weight.grad_added_to_main_grad
    assert weight.grad.shape == weight.shape
    if zero_out:
        assert (weight.grad == 0).all()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(buffer - 0.5, reference.grad.float(), rtol=tolerance, atol=tolerance)
    assert (buffer[53:] == 0.5).all()


class FullyShardedWeight(torch.nn.Parameter):
    """A weight as Megatron-FSDP leaves it: its buffer is lent, in a backward pass alone, over
    memory that holds anything, and what autograd returns is copied into it.
    """

    def get_main_grad(self):
        raise AssertionError("a buffer of gradients is lent to layers that overwrite it")

    def end_of_backward(self):
        """The host's own hook after a backward pass (megatron_fsdp.py of core 0.19)."""
        bucket = torch.full(self.shape, 777.0)
        if not self.grad_added_to_main_grad:
            bucket.copy_(self.grad)
        return bucket


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
def test_a_fully_sharded_weight_gets_the_sum_of_all_that_share_it(gradient):
    """The output layer and a head for multi-token prediction, of one weight."""
    case = make_case()
    weight = FullyShardedWeight(case.weight.float())
    weight.grad_added_to_main_grad = False
    reference = case.weight.float().requires_grad_()
    for parameter, fusion in ((weight, True), (reference, False)):
        options = dict(gradient=gradient, token_weights=torch.ones(7, 2))
        options["gradient_accumulation_fusion"] = fusion
        loss = fused(case, case.hidden.float(), parameter, **options)
        other = fused(case, case.hidden.float() * 2, parameter, **options)
        (loss.sum() + other.sum()).backward()
    torch.testing.assert_close(weight.end_of_backward(), reference.grad)


def test_fusion_without_buffer_is_refused():
    case = make_case()
    hidden, weight, _ = leaves(case)
    with pytest.raises(ValueError, match="main_grad"):
        fused(
            case,
            hidden,
            weight,
            gradient="in_forward",
            token_weights=torch.ones(7, 2),
            gradient_accumulation_fusion=True,
        )


def test_weight_gradient_is_summed_in_fp32():
    """256 products in bf16: a running sum in bf16 would be off by 5 times what one product is."""
    case = make_case(positions=1024, batch=1, vocab=40, bias=False)
    weight = case.weight.bfloat16()
    parameter, buffer = as_parameter(weight, torch.bfloat16)
    buffer.zero_()
    fused(
        case,
        case.hidden.bfloat16(),
        parameter,
        chunk_size=2,
        gradient_accumulation_fusion=True,
    ).sum().backward()
    upstream = torch.ones(1024, 1)
    truth = run(plain, case, torch.float64, upstream)["d_weight"]
    one_product = run(plain, case, torch.bfloat16, upstream)["d_weight"]
    assert (buffer.double() - truth).norm() <= 1.3 * (one_product - truth).norm()


def test_tied_weight_and_extra_heads():
    """One weight as embedding, KD head, and label-only head of an extra prediction depth."""
    case = make_case()
    tokens = torch.randint(0, 53, (7, 2))
    rolled = case.labels.roll(-1, 0)
    rolled[-1] = -100

    def total(weight, main, extra):
        embedded = torch.nn.functional.embedding(tokens, weight)
        return (main(embedded, weight) * case.token_weights).sum() + extra(
            embedded * 2, weight
        ).sum()

    weight = case.weight.clone().requires_grad_()
    total(
        weight,
        lambda h, w: fused(
            case, h, w, gradient="in_forward", token_weights=case.token_weights, bias=None
        ),
        lambda h, w: fused_cross_entropy(h, w, rolled, chunk_size=3),
    ).backward()
    want = case.weight.clone().requires_grad_()
    total(
        want,
        lambda h, w: dense_kd_loss(h @ w.T, case.target),
        lambda h, w: torch.nn.functional.cross_entropy(
            (h @ w.T).flatten(0, 1), rolled.flatten(), reduction="none"
        ),
    ).backward()
    torch.testing.assert_close(weight.grad, want.grad)
