"""Every head, objective and tail against fp64, on inputs that break careless code."""

import pytest
import torch
from loss_cases import HEADS, assert_close, make_case, plain, run, upstream_of

from megatron_kd.losses import TopKTarget, dense_kd_loss, sparse_chunked_kd_loss


def ordinary():
    """Odd sizes, a bias, a label on the support, one ignored, unused slots, an empty row."""
    case = make_case(positions=7, batch=3, features=17, vocab=507, support=9, chunk_size=3)
    ids, logprobs = case.target.ids.clone(), case.target.logprobs.clone()
    ids[2, 1, 4:], logprobs[2, 1, 4:] = -1, float("-inf")
    ids[3, 0], logprobs[3, 0] = -1, float("-inf")
    case.target = TopKTarget(ids.to(torch.int32), logprobs)
    case.labels[1, 0] = ids[1, 0, 2]
    case.labels[4, 2] = -100
    return case


def first_column():
    """Unused slots and foreign ids must not touch column 0, in the support or not."""
    topk = torch.tensor([[[0, 3, 5]], [[5, 3, 1]], [[2, 0, 1]]])
    case = make_case(positions=3, batch=1, vocab=8, topk=topk, chunk_size=2)
    ids, logprobs = topk.clone(), case.target.logprobs.clone()
    ids[0, 0, 2], ids[1, 0, 2] = -1, -1
    logprobs[0, 0, 2] = logprobs[1, 0, 2] = float("-inf")
    case.target = TopKTarget(ids, logprobs)
    case.labels[:] = torch.tensor([[0], [0], [4]])
    return case


def chunk_of_one():
    return make_case(chunk_size=1, vocab=123)


def chunk_beyond_end():
    return make_case(chunk_size=1000, padding=5, vocab=58)


def whole_pages():
    """Rows of whole pages of memory, which the fused heads keep apart."""
    return make_case(positions=5, batch=1, vocab=1024)


def one_kept():
    return make_case(support=1)


def all_kept():
    return make_case(support=53)


def support_far_above():
    """Support 24 nats above the rest: 1 - sum q would lose the student's residual."""
    logits = torch.randn(6, 1, 40, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    topk = torch.arange(4).expand(6, 1, 4)
    logits[..., :4] += 24
    return make_case(logits=logits.bfloat16(), topk=topk, teacher_logits=logits / 4)


def common_offset():
    logits = torch.randn(6, 1, 40, generator=torch.Generator().manual_seed(2)) * 3 + 1e4
    return make_case(logits=logits.bfloat16())


def huge_logits():
    make = torch.Generator().manual_seed(3)
    logits = (torch.rand(6, 1, 40, generator=make) - 0.5).sign() * 1e4
    return make_case(logits=logits.bfloat16())


def tiny_teacher_mass():
    """Mass 1e-6 on the support."""
    teacher = torch.zeros(5, 1, 40)
    teacher[..., :4] = -16.1
    return make_case(
        logits=torch.randn(5, 1, 40, generator=torch.Generator().manual_seed(4)).bfloat16(),
        topk=torch.arange(4).expand(5, 1, 4),
        teacher_logits=teacher,
    )


def nearly_whole_teacher_mass():
    """Mass 1 - 1e-7 on the support."""
    teacher = torch.zeros(5, 1, 40)
    teacher[..., 0] = 18.3
    teacher[..., 1:4] = 18.0
    return make_case(
        logits=torch.randn(5, 1, 40, generator=torch.Generator().manual_seed(5)).bfloat16(),
        topk=torch.arange(4).expand(5, 1, 4),
        teacher_logits=teacher,
    )


def cold():
    return make_case(temperature=0.05, captured=True, seed=6)


def hot():
    return make_case(temperature=20.0, captured=True, seed=7)


CASES = (
    ordinary,
    first_column,
    chunk_of_one,
    chunk_beyond_end,
    whole_pages,
    one_kept,
    all_kept,
    support_far_above,
    common_offset,
    huge_logits,
    tiny_teacher_mass,
    nearly_whole_teacher_mass,
    cold,
    hot,
)


@pytest.mark.parametrize("tail", ["none", "renormalize", "bucket"])
@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_against_fp64(make, objective, tail):
    case = make().with_options(objective=objective, tail=tail, beta=0.3, ce_weight=0.25)
    upstream = upstream_of(case)
    truth = run(plain, case, torch.float64, upstream)
    for dtype in (torch.float32, torch.bfloat16):
        yardstick = run(plain, case, dtype, upstream)
        for head in HEADS:
            got = run(head, case, dtype, upstream)
            chunked = head.__name__ in ("recompute", "in_forward")
            factor = 4 if chunked else 2
            assert_close(got, truth, yardstick, dtype, factor, f"{head.__name__} {dtype}")


@pytest.mark.parametrize("tail", ["none", "renormalize"])
@pytest.mark.parametrize("temperature", [0.05, 0.5, 3.0, 20.0])
def test_temperature_without_captured_normalizer(temperature, tail):
    case = make_case(temperature=temperature, seed=8).with_options(
        objective="jsd", tail=tail, temperature_squared=True, ce_weight=0.5
    )
    upstream = upstream_of(case)
    truth = run(plain, case, torch.float64, upstream)
    yardstick = run(plain, case, torch.float32, upstream)
    for head in HEADS:
        got = run(head, case, torch.float32, upstream)
        assert_close(got, truth, yardstick, torch.float32, 4, head.__name__)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_double_precision_is_kept(head):
    """fp64 in, fp64 throughout: anything that falls back to fp32 on the way shows."""
    case = ordinary().with_options(objective="jsd", tail="bucket", beta=0.7, ce_weight=0.25)
    upstream = upstream_of(case)
    truth = run(plain, case, torch.float64, upstream)
    got = run(head, case, torch.float64, upstream)
    for name, want in truth.items():
        torch.testing.assert_close(got[name], want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_support_far_above_keeps_the_residual(head):
    """The gradient off the support is q (1 - rho / r): each element to 1e-5 of itself."""
    case = support_far_above().with_options(tail="bucket")
    off = case.hidden.clone()
    upstream = torch.ones_like(case.token_weights)
    case.token_weights[:] = 1
    truth = run(plain, case, torch.float64, upstream)["d_hidden"][..., 4:]
    got = run(head, case, torch.float32, upstream)["d_hidden"][..., 4:]
    assert off[..., :4].min() > off[..., 4:].max() + 15
    assert ((got - truth).abs() <= 1e-5 * truth.abs() + 1e-12).all()


@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_all_masked(head, objective):
    """All weights zero: zero gradients, not 0/0; the loss itself is still reported."""
    case = make_case().with_options(objective=objective, tail="bucket")
    case.token_weights[:] = 0
    got = run(head, case, torch.float32, torch.zeros_like(case.token_weights))
    assert torch.isfinite(got["loss"]).all() and got["loss"].abs().max() > 0
    for name in ("d_hidden", "d_weight", "d_bias"):
        assert (got[name] == 0).all(), name


@pytest.mark.parametrize("function", [dense_kd_loss, sparse_chunked_kd_loss])
@pytest.mark.parametrize("tail", ["none", "bucket"])
@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd"])
def test_largest_finite_logits(objective, tail, function):
    """Of either sign, on the support and off it: no NaN in the loss, finite gradients."""
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([largest, -largest, 0.0, 1.0, largest, -largest]).repeat(4, 1, 1)
    topk = torch.tensor([[[0, 1]], [[1, 2]], [[4, 0]], [[3, 2]]])
    case = make_case(logits=logits, topk=topk).with_options(
        objective=objective, tail=tail, ce_weight=0.5
    )
    logits.requires_grad_()
    loss = function(logits, case.target, **case.keywords())
    loss.sum().backward()
    assert not torch.isnan(loss).any()
    assert torch.isfinite(logits.grad).all()
