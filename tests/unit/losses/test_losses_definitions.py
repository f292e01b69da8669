"""The definitions themselves: known values, other people's functions, and gradcheck."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from loss_cases import HEADS, dense, in_forward, make_case, recompute, run, sparse

from megatron_kd.losses import (
    Divergence,
    TopKTarget,
    dense_kd_loss,
    dense_online_kd_loss,
    fused_chunked_kd_loss,
    fused_cross_entropy,
    fused_online_kd_loss,
)
from megatron_kd.losses.support import logger


def two_outcomes():
    """Teacher (.6, .4) of which the first is kept; student (.9, .1)."""
    logits = torch.tensor([[[0.9, 0.1]]]).log()
    return logits, TopKTarget(torch.tensor([[[0]]]), torch.tensor([[[0.6]]]).log())


def test_truncated_loss_is_negative_and_not_clamped():
    logits, target = two_outcomes()
    logits.requires_grad_()
    loss = dense_kd_loss(logits, target)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-0.243279, abs=1e-6)
    # M q - p: a clamp would have made these zero
    torch.testing.assert_close(logits.grad, torch.tensor([[[-0.06, 0.06]]]), rtol=1e-5, atol=1e-6)


def test_bucket_and_renormalize_by_hand():
    logits, target = two_outcomes()
    bucket = dense_kd_loss(logits, target, divergence=Divergence(tail="bucket")).item()
    assert bucket == pytest.approx(0.6 * math.log(0.6 / 0.9) + 0.4 * math.log(0.4 / 0.1), rel=1e-5)
    # the student is over the whole vocabulary: only the teacher is divided by its mass
    divergence = Divergence(tail="renormalize")
    renormalized = dense_kd_loss(logits, target, divergence=divergence).item()
    assert renormalized == pytest.approx(-math.log(0.9), rel=1e-5)
    divergence = Divergence(objective="reverse_kl", tail="bucket")
    reverse = dense_kd_loss(logits, target, divergence=divergence).item()
    assert reverse == pytest.approx(0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4), rel=1e-5)


def test_reverse_kl_takes_a_whole_teacher_to_have_one_rounding_left():
    """A mass of 1 leaves nothing off the support, where the student has 10 %: 2⁻²³, not 0."""
    logits, target = (
        torch.tensor([[[0.9, 0.1]]]).log(),
        TopKTarget(torch.tensor([[[0]]]), torch.tensor([[[0.0]]])),
    )
    divergence = Divergence(objective="reverse_kl", tail="bucket")
    loss = dense_kd_loss(logits, target, divergence=divergence).item()
    want = 0.9 * math.log(0.9) + 0.1 * (math.log(0.1) + 23 * math.log(2))
    assert loss == pytest.approx(want, rel=1e-5)


def test_loss_sees_student_mass_off_the_support():
    """Renormalising both sides would be blind to it: loss 0 with 99.98 % of the mass elsewhere."""
    logits = torch.tensor([[[0.0, 0.0, 9.2]]])
    target = TopKTarget(torch.tensor([[[0, 1]]]), torch.tensor([[[0.5, 0.5]]]).log())
    for tail in ("none", "renormalize", "bucket"):
        assert dense_kd_loss(logits, target, divergence=Divergence(tail=tail)).item() > 8


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_whole_support_is_the_textbook_divergence(temperature):
    make = torch.Generator().manual_seed(0)
    z = torch.randn(5, 2, 30, generator=make, dtype=torch.float64)
    y = torch.randn(5, 2, 30, generator=make, dtype=torch.float64)
    log_q, log_p = torch.log_softmax(z / temperature, -1), torch.log_softmax(y / temperature, -1)
    log_m = (0.3 * log_p.exp() + 0.7 * log_q.exp()).log()

    def kl(log_a, log_b):
        return F.kl_div(log_b, log_a, log_target=True, reduction="none").sum(-1)

    want = {
        "forward_kl": kl(log_p, log_q),
        "reverse_kl": kl(log_q, log_p),
        "jsd": 0.3 * kl(log_p, log_m) + 0.7 * kl(log_q, log_m),
    }
    target = TopKTarget(
        torch.arange(30).expand(5, 2, 30),
        torch.log_softmax(y, -1),
        torch.logsumexp(torch.log_softmax(y, -1) / temperature, -1),
    )
    eye = torch.eye(30, dtype=torch.float64)
    for objective, expected in want.items():
        divergence = Divergence(objective=objective, temperature=temperature, beta=0.3)
        common = dict(divergence=divergence)
        for tail in ("none", "renormalize", "bucket"):
            got = dense_kd_loss(z, target, divergence=replace(divergence, tail=tail))
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(dense_online_kd_loss(z, y, **common), expected)
        fused = fused_online_kd_loss(z, eye, y, eye, chunk_size=2, **common)
        torch.testing.assert_close(fused, expected)
        squared = replace(divergence, temperature_squared=True)
        squared = dense_kd_loss(z, target, divergence=squared)
        torch.testing.assert_close(squared, expected * temperature**2, rtol=1e-9, atol=1e-10)


def test_temperature_without_normalizer_keeps_the_mass_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr("megatron_kd.losses.support._warned", set())
    monkeypatch.setattr(logger, "propagate", True)
    logprobs = torch.tensor([[[0.5, 0.3]]]).log()
    target = TopKTarget(torch.tensor([[[2, 0]]]), logprobs)
    z = torch.tensor([[[0.3, -0.1, 0.9]]])
    with caplog.at_level("WARNING"):
        loss = dense_kd_loss(z, target, divergence=Divergence(temperature=2.0))
        dense_kd_loss(z, target, divergence=Divergence(temperature=2.0))
    p = 0.8 * torch.softmax(logprobs / 2, -1)
    log_q = torch.log_softmax(z / 2, -1)[..., [2, 0]]
    torch.testing.assert_close(loss, (p * (p.log() - log_q)).sum(-1))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_cross_entropy_is_torchs(temperature):
    """At temperature 1 whatever the divergence's temperature; mixed, reported, and alone."""
    case = make_case(temperature=temperature, captured=True)
    case.labels[2, 1] = -100
    logits = case.hidden @ case.weight.T + case.bias
    want = F.cross_entropy(logits.flatten(0, 1), case.labels.flatten(), reduction="none")
    want = want.view(case.labels.shape)
    options = dict(bias=case.bias, labels=case.labels, chunk_size=3)
    args = (case.hidden, case.weight, case.target)
    divergence = Divergence(temperature=temperature)
    kd = fused_chunked_kd_loss(*args, divergence=divergence, **options)
    mixed, metrics = fused_chunked_kd_loss(
        *args, divergence=replace(divergence, ce_weight=0.3), return_metrics=True, **options
    )
    torch.testing.assert_close(metrics.lm_loss, want)
    torch.testing.assert_close(mixed, 0.7 * kd + 0.3 * want)
    alone = fused_cross_entropy(case.hidden, case.weight, case.labels, bias=case.bias, chunk_size=3)
    torch.testing.assert_close(alone, want)


def test_metrics_are_the_masses():
    case = make_case(temperature=2.0, captured=True)
    logits = case.hidden @ case.weight.T + case.bias
    ids = case.target.ids
    _, metrics = fused_chunked_kd_loss(
        case.hidden,
        case.weight,
        case.target,
        bias=case.bias,
        divergence=Divergence(temperature=2.0),
        return_metrics=True,
    )
    assert metrics.lm_loss is None
    student = torch.softmax(logits / 2, -1).gather(-1, ids).sum(-1)
    torch.testing.assert_close(metrics.student_mass, student)
    log_p = case.target.logprobs.double() / 2 - case.target.log_z_tau.double().unsqueeze(-1)
    torch.testing.assert_close(metrics.teacher_mass, log_p.exp().sum(-1))
    _, metrics = dense_kd_loss(
        logits,
        TopKTarget(ids, case.target.logprobs),
        divergence=Divergence(tail="renormalize"),
        return_metrics=True,
    )
    mass = case.target.logprobs.double().exp().sum(-1)
    torch.testing.assert_close(metrics.teacher_mass, mass)


class Anew(torch.autograd.Function):
    """A loss that is run again for every backward pass: gradcheck asks for several of one graph,
    and some heads give away in the first what they stored.
    """

    @staticmethod
    def forward(ctx, loss, *inputs):
        ctx.loss = loss
        ctx.save_for_backward(*inputs)
        return loss(*inputs)

    @staticmethod
    def backward(ctx, upstream):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            value = ctx.loss(*inputs)
        return None, *torch.autograd.grad(value, inputs, upstream)


def passes_gradcheck(loss, case) -> bool:
    inputs = [x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    return torch.autograd.gradcheck(lambda *inputs: Anew.apply(loss, *inputs), inputs)


@pytest.mark.parametrize("head", [dense, sparse, recompute, in_forward], ids=lambda h: h.__name__)
@pytest.mark.parametrize("tail", ["none", "renormalize", "bucket"])
@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd"])
def test_gradcheck(objective, tail, head):
    small = dict(positions=3, batch=1, features=4, vocab=9, support=3, chunk_size=2)
    case = make_case(**small, temperature=1.5, captured=True)
    case = case.with_options(
        objective=objective, tail=tail, beta=0.3, ce_weight=0.2, temperature_squared=True
    )

    def loss(*inputs):
        per_token = head(*inputs, case)
        # in_forward wants the weights it was told, under one scalar
        return (per_token * case.token_weights).sum() if head is in_forward else per_token

    assert passes_gradcheck(loss, case)


@pytest.mark.parametrize("head", ["dense", "recompute", "in_forward"])
@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd"])
def test_gradcheck_online(objective, head):
    case = make_case(positions=3, batch=1, features=4, vocab=9)
    make = torch.Generator().manual_seed(9)
    teacher = torch.randn(3, 1, 5, generator=make, dtype=torch.float64)
    teacher_weight = torch.randn(9, 5, generator=make, dtype=torch.float64)
    divergence = Divergence(
        objective=objective, temperature=1.5, beta=0.3, ce_weight=0.2, temperature_squared=True
    )
    options = dict(divergence=divergence, labels=case.labels)

    def loss(hidden, weight, bias):
        if head == "dense":
            logits = hidden @ weight.T + bias
            return dense_online_kd_loss(logits, teacher @ teacher_weight.T, **options)
        per_token = fused_online_kd_loss(
            hidden,
            weight,
            teacher,
            teacher_weight,
            bias=bias,
            chunk_size=2,
            gradient=head,
            token_weights=case.token_weights,
            **options,
        )
        return (per_token * case.token_weights).sum() if head == "in_forward" else per_token

    assert passes_gradcheck(loss, case)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
@pytest.mark.parametrize("objective", ["forward_kl", "reverse_kl", "jsd"])
def test_micro_batches_of_ragged_supports(objective, head):
    """Micro-batch 1 twice accumulates what micro-batch 2 gives; supports padded with -inf."""
    case = make_case(batch=2).with_options(objective=objective, tail="bucket")
    ids, logprobs = case.target.ids.clone(), case.target.logprobs.clone()
    ids[:, 1, 2:], logprobs[:, 1, 2:] = -1, float("-inf")
    case.target = TopKTarget(ids, logprobs)
    upstream = case.token_weights.double()
    both = run(head, case, torch.float32, upstream)
    parts = []
    for b in range(2):
        part = make_case(batch=2).with_options(objective=objective, tail="bucket")
        part.hidden, part.labels = case.hidden[:, b : b + 1], case.labels[:, b : b + 1]
        part.token_weights = case.token_weights[:, b : b + 1]
        used = 6 if b == 0 else 2  # the shorter support needs no padding when it is alone
        part.target = TopKTarget(ids[:, b : b + 1, :used], logprobs[:, b : b + 1, :used])
        parts.append(run(head, part, torch.float32, upstream[:, b : b + 1]))
    loss = torch.cat([x["loss"] for x in parts], 1)
    torch.testing.assert_close(loss, both["loss"], rtol=1e-5, atol=1e-6)
    total = parts[0]["d_weight"] + parts[1]["d_weight"]
    torch.testing.assert_close(total, both["d_weight"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_padded_vocabularies(fused):
    """Teacher of 152064 rows, student of 151936: refused with the remedy, or the rest masked."""
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 1, 4, generator=make)
    teacher = torch.randn(2, 1, 4, generator=make)
    weight = torch.randn(151936, 4, generator=make).requires_grad_()
    teacher_weight = torch.randn(152064, 4, generator=make)

    def loss(**options):
        if fused:
            return fused_online_kd_loss(hidden, weight, teacher, teacher_weight, **options)
        return dense_online_kd_loss(hidden @ weight.T, teacher @ teacher_weight.T, **options)

    with pytest.raises(ValueError, match="vocab_size"):
        loss()
    got = loss(vocab_size=151665)
    got.sum().backward()
    want = F.kl_div(
        torch.log_softmax(hidden @ weight[:151665].T, -1),
        torch.log_softmax(teacher @ teacher_weight[:151665].T, -1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert weight.grad[:151665].abs().max() > 0
    assert (weight.grad[151665:] == 0).all()


def test_foreign_ids_are_refused_with_the_remedy():
    case = make_case()
    ids = case.target.ids.clone()
    ids[0, 0, 0] = 53
    with pytest.raises(ValueError, match="mask those ids with -1"):
        dense_kd_loss(torch.zeros(7, 2, 53), TopKTarget(ids, case.target.logprobs))
    with pytest.raises(ValueError, match="the vocabulary ends at 50"):
        dense_kd_loss(torch.zeros(7, 2, 53), case.target, vocab_size=50)
