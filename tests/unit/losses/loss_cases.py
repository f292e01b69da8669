"""Inputs, heads and the yardstick that the tests of the losses share.

Letters: S sequence, B micro-batch, D hidden, V vocabulary, K support.
"""

from dataclasses import dataclass, replace

import torch

from megatron_kd.losses import (
    Divergence,
    TopKTarget,
    dense_kd_loss,
    fused_chunked_kd_loss,
    reference,
    sparse_chunked_kd_loss,
)

NAMES = ("loss", "d_hidden", "d_weight", "d_bias")


@dataclass
class Case:
    hidden: torch.Tensor  # [S, B, D] fp64, representable in every dtype it is tested in
    weight: torch.Tensor  # [V, D] fp64
    bias: torch.Tensor | None  # [V] fp64
    target: TopKTarget
    labels: torch.Tensor  # [S, B]
    divergence: Divergence
    token_weights: torch.Tensor  # [S, B] fp32, some zero
    chunk_size: int = 4
    vocab_size: int | None = None

    def with_options(self, **options):
        return replace(self, divergence=replace(self.divergence, **options))

    def keywords(self):
        return dict(divergence=self.divergence, labels=self.labels, vocab_size=self.vocab_size)


def make_case(
    *,
    positions=7,
    batch=2,
    features=17,
    vocab=53,
    support=6,
    padding=0,
    bias=True,
    temperature=1.0,
    captured=False,
    logits=None,
    teacher_logits=None,
    topk=None,
    seed=0,
    **more,
):
    """Random; with logits [S, B, V] given the weight is the identity and hidden are the logits."""
    make = torch.Generator().manual_seed(seed)
    if logits is not None:
        positions, batch, vocab = logits.shape
        hidden, weight, bias = logits.double(), torch.eye(vocab, dtype=torch.float64), False
    else:
        hidden = torch.randn(positions, batch, features, generator=make)
        weight = torch.randn(vocab, features, generator=make)
        hidden, weight = hidden.bfloat16().double(), weight.bfloat16().double()
    real = vocab - padding
    offset = torch.randn(vocab, generator=make).bfloat16().double() if bias else None
    if teacher_logits is None:
        teacher_logits = torch.randn(positions, batch, real, generator=make) * 2
    log_p = torch.log_softmax(teacher_logits.double(), -1)
    ids = (
        torch.rand(log_p.shape, generator=make).argsort(-1)[..., :support] if topk is None else topk
    )
    target = TopKTarget(
        ids,
        log_p.gather(-1, ids).float(),
        torch.logsumexp(log_p / temperature, -1).float() if captured else None,
    )
    labels = torch.randint(0, real, (positions, batch), generator=make)
    token_weights = torch.rand(positions, batch, generator=make) + 0.25
    token_weights[0] = 0
    return Case(
        hidden,
        weight,
        offset,
        target,
        labels,
        Divergence(temperature=temperature),
        token_weights,
        vocab_size=real if padding else None,
        **more,
    )


def run(loss_of, case: Case, dtype, upstream):
    """loss, d_hidden, d_weight, d_bias of loss_of(hidden, weight, bias, case); upstream [S, B]."""
    leaves = [
        None if x is None else x.to(dtype, copy=True).requires_grad_()
        for x in (case.hidden, case.weight, case.bias)
    ]
    loss = loss_of(*leaves, case)
    (loss * upstream.to(loss.dtype)).sum().backward()
    values = (loss.detach(), *(None if x is None else x.grad for x in leaves))
    return {name: x.double() for name, x in zip(NAMES, values, strict=True) if x is not None}


def logits_of(hidden, weight, bias):
    logits = hidden @ weight.T
    return logits if bias is None else logits + bias


def plain(hidden, weight, bias, case: Case):
    """The definition on whole logits, rounded to the dtype of the products, then fp32."""
    logits = logits_of(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return reference.topk_loss(logits, case.target, case.divergence, case.labels, case.vocab_size)


def dense(hidden, weight, bias, case: Case):
    return dense_kd_loss(logits_of(hidden, weight, bias), case.target, **case.keywords())


def sparse(hidden, weight, bias, case: Case):
    logits = logits_of(hidden, weight, bias)
    return sparse_chunked_kd_loss(
        logits, case.target, chunk_size=case.chunk_size, **case.keywords()
    )


def sparse_reuse(hidden, weight, bias, case: Case):
    return sparse_chunked_kd_loss(
        logits_of(hidden, weight, bias),
        case.target,
        chunk_size=case.chunk_size,
        reuse_logits=True,
        **case.keywords(),
    )


def recompute(hidden, weight, bias, case: Case):
    return fused_chunked_kd_loss(
        hidden, weight, case.target, bias=bias, chunk_size=case.chunk_size, **case.keywords()
    )


def in_forward(hidden, weight, bias, case: Case):
    return fused_chunked_kd_loss(
        hidden,
        weight,
        case.target,
        bias=bias,
        chunk_size=case.chunk_size,
        gradient="in_forward",
        token_weights=case.token_weights,
        **case.keywords(),
    )


HEADS = (dense, sparse, sparse_reuse, recompute, in_forward)


def upstream_of(case: Case):
    """Not uniform, the first position masked; a multiple of token_weights, as in_forward wants."""
    return case.token_weights.double() * -1.75


def assert_close(got, truth, yardstick, dtype, factor, context=""):
    """Errors within factor times those of the yardstick (same dtype), and a few roundings."""
    eps = torch.finfo(dtype).eps
    for name, want in truth.items():
        assert torch.isfinite(got[name]).all(), f"{context} {name}: not finite"
        floor = (yardstick[name] - want).abs().max()
        error = (got[name] - want).abs().max()
        bound = factor * floor + 8 * eps * want.abs().max()
        assert error <= bound, f"{context} {name}: error {error:.2e}, bound {bound:.2e}"
