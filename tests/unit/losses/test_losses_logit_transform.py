"""Models that scale or cap their logits: every head, kernel and form of the gradient against fp64.

S sequence, B micro-batch, D hidden, V vocabulary, K support.
"""

import itertools
import math

import pytest
import torch
from loss_cases import HEADS, assert_close, logits_of, make_case, run, upstream_of

from megatron_kd.losses import (
    TopKTarget,
    dense_kd_loss,
    dense_online_kd_loss,
    fused_chunked_kd_loss,
    fused_cross_entropy,
    fused_online_kd_loss,
    kernels,
    reference,
    sparse_chunked_kd_loss,
)
from megatron_kd.losses.kernels import compiled, eager
from megatron_kd.losses.logit_transform import LogitTransform

CAPPED = dict(logit_softcap=5.0)  # the case's products reach ±15: well into the cap
BOTH = dict(logit_softcap=3.0, logit_scale=0.4)
SCALED = dict(logit_scale=0.25)
TRANSFORMS = (CAPPED, BOTH, SCALED)


def name_of(options):
    return " ".join(f"{name}={value}" for name, value in options.items())


def transformed(logits, options):
    return reference.transformed(
        logits, options.get("logit_scale", 1.0), options.get("logit_softcap")
    )


def with_transform(options):
    """The definition, and every head from the same products, of a model that has a transform."""

    def plain(hidden, weight, bias, case):
        logits = logits_of(hidden, weight, bias)
        logits = transformed(logits, options)  # rounded once more, as a host's own layer does
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return reference.topk_loss(
            logits, case.target, case.divergence, case.labels, case.vocab_size
        )

    def dense(hidden, weight, bias, case):
        x = logits_of(hidden, weight, bias)
        return dense_kd_loss(x, case.target, **options, **case.keywords())

    def sparse(hidden, weight, bias, case, **more):
        x = logits_of(hidden, weight, bias)
        return sparse_chunked_kd_loss(
            x, case.target, chunk_size=case.chunk_size, **more, **options, **case.keywords()
        )

    def sparse_reuse(*arguments):
        return sparse(*arguments, reuse_logits=True)

    def fused(hidden, weight, bias, case, **more):
        return fused_chunked_kd_loss(
            hidden,
            weight,
            case.target,
            bias=bias,
            chunk_size=case.chunk_size,
            **more,
            **options,
            **case.keywords(),
        )

    def in_forward(hidden, weight, bias, case):
        weights = case.token_weights
        return fused(hidden, weight, bias, case, gradient="in_forward", token_weights=weights)

    return plain, (dense, sparse, sparse_reuse, fused, in_forward)


def ordinary(**more):
    """Odd sizes, a label on the support, one ignored, unused slots, a row without a teacher."""
    case = make_case(positions=7, batch=3, vocab=507, support=9, chunk_size=3, padding=6, **more)
    ids, logprobs = case.target.ids.clone(), case.target.logprobs.clone()
    ids[2, 1, 4:], logprobs[2, 1, 4:] = -1, float("-inf")
    ids[3, 0], logprobs[3, 0] = -1, float("-inf")
    case.target = TopKTarget(ids, logprobs, case.target.log_z_tau)
    case.labels[1, 0] = ids[1, 0, 2]
    case.labels[4, 2] = -100
    return case


def column_zero():
    """Foreign and unused slots point at column 0, which is a label and in one support."""
    topk = torch.tensor([[[0, 3, 5]], [[5, 3, 1]], [[2, 0, 1]]])
    case = make_case(positions=3, batch=1, vocab=8, topk=topk, chunk_size=2)
    case.labels[:] = torch.tensor([[0], [0], [4]])
    return case


def whole_support():
    return make_case(support=53)


def one_kept():
    return make_case(support=1)


def hot():
    return ordinary(temperature=2.5, captured=True)


@pytest.mark.parametrize("options", TRANSFORMS, ids=name_of)
@pytest.mark.parametrize(
    "make", [ordinary, column_zero, whole_support, one_kept, hot], ids=lambda make: make.__name__
)
def test_every_head_against_fp64(make, options):
    plain, heads = with_transform(options)
    for objective, tail in itertools.product(("forward_kl", "jsd"), ("none", "bucket")):
        case = make().with_options(objective=objective, tail=tail, beta=0.3, ce_weight=0.25)
        upstream = upstream_of(case)
        truth = run(plain, case, torch.float64, upstream)
        for head in heads:
            got = run(head, case, torch.float64, upstream)
            for name, want in truth.items():
                torch.testing.assert_close(got[name], want, rtol=1e-10, atol=1e-11)
        for dtype in (torch.float32, torch.bfloat16):
            yardstick = run(plain, case, dtype, upstream)
            for head in heads:
                got = run(head, case, dtype, upstream)
                chunked = head.__name__ in ("fused", "in_forward")
                context = f"{head.__name__} {objective} {tail} {dtype}"
                assert_close(got, truth, yardstick, dtype, 4 if chunked else 2, context)


@pytest.mark.parametrize("options", TRANSFORMS, ids=name_of)
def test_the_case_feels_the_transform(options):
    """Else the comparisons above would hold without it."""
    case = ordinary()
    plain, heads = with_transform(options)
    without, _ = with_transform({})
    want, other = (run(f, case, torch.float64, upstream_of(case))["loss"] for f in (plain, without))
    assert ((want - other).abs() > 0.05 * other.abs()).float().mean() > 0.9


def online(options, teacher_options, head):
    """Online with a teacher of another width that has a transform of its own."""
    make = torch.Generator().manual_seed(3)
    teacher = torch.randn(7, 3, 5, generator=make, dtype=torch.float64) * 3
    teacher_weight = torch.randn(507, 5, generator=make, dtype=torch.float64)
    keywords = options | {f"teacher_{name}": value for name, value in teacher_options.items()}

    def plain(hidden, weight, bias, case):
        z = transformed(logits_of(hidden, weight, bias), options)
        y = transformed((teacher @ teacher_weight.T).to(hidden.dtype), teacher_options)
        z, y = (x if x.dtype == torch.float64 else x.float() for x in (z, y))
        return reference.full_loss(z, y, case.divergence, case.labels, case.vocab_size)

    def ours(hidden, weight, bias, case):
        t, w = teacher.to(hidden.dtype), teacher_weight.to(hidden.dtype)
        if head == "dense":
            x = logits_of(hidden, weight, bias)
            return dense_online_kd_loss(x, t @ w.T, **keywords, **case.keywords())
        return fused_online_kd_loss(
            hidden,
            weight,
            t,
            w,
            bias=bias,
            chunk_size=3,
            gradient=head,
            token_weights=case.token_weights,
            **keywords,
            **case.keywords(),
        )

    return plain, ours


PAIRS = [(CAPPED, {}), ({}, CAPPED), (BOTH, SCALED), (SCALED, BOTH)]


@pytest.mark.parametrize("head", ["dense", "recompute", "in_forward"])
@pytest.mark.parametrize("options, teacher_options", PAIRS, ids=name_of)
def test_online_against_fp64(options, teacher_options, head):
    plain, ours = online(options, teacher_options, head)
    for objective in ("forward_kl", "reverse_kl", "jsd"):
        case = hot().with_options(objective=objective, beta=0.3, ce_weight=0.25)
        upstream = upstream_of(case)
        truth = run(plain, case, torch.float64, upstream)
        got = run(ours, case, torch.float64, upstream)
        for name, want in truth.items():
            torch.testing.assert_close(got[name], want, rtol=1e-10, atol=1e-11)
        for dtype in (torch.float32, torch.bfloat16):
            got = run(ours, case, dtype, upstream)
            yardstick = run(plain, case, dtype, upstream)
            assert_close(got, truth, yardstick, dtype, 4, f"{objective} {dtype}")


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
def test_cross_entropy_alone(gradient):
    case = ordinary()
    options = dict(BOTH, gradient=gradient, token_weights=case.token_weights, chunk_size=2)

    def ours(hidden, weight, bias, case):
        return fused_cross_entropy(
            hidden, weight, case.labels, bias=bias, vocab_size=case.vocab_size, **options
        )

    def plain(hidden, weight, bias, case):
        z = transformed(logits_of(hidden, weight, bias), BOTH)[..., : case.vocab_size]
        return reference.cross_entropy(z, case.labels)

    want, got = (run(f, case, torch.float64, upstream_of(case)) for f in (plain, ours))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-11)


def test_saturated_logits_keep_the_digits_of_their_slopes():
    """1 - tanh² is 0 in fp32 from 9 on; the derivative there is 4 exp(-2 · 9), and adds up."""
    x = torch.tensor([-45.0, -20.0, 0.0, 1e-3, 7.5, 44.0, 60.0, 1e30, -1e30])
    for transform in (LogitTransform(1.0, 5.0), LogitTransform(0.3, 1.5)):
        exact = x.double().requires_grad_()
        z = transform.softcap * torch.tanh(transform.scale * exact / transform.softcap)
        want = transform.scale / torch.cosh(transform.scale * exact / transform.softcap) ** 2
        torch.testing.assert_close(transform.logits(x).double(), z, rtol=1e-6, atol=0)
        torch.testing.assert_close(transform.slopes(x).double(), want, rtol=3e-5, atol=1e-37)
        (derivative,) = torch.autograd.grad(z.sum(), exact)
        torch.testing.assert_close(want, derivative, rtol=1e-6, atol=1e-12)


def test_what_was_cut_out_stays_cut_out():
    cut = torch.tensor([-math.inf])
    for transform in (LogitTransform(1.0, 5.0), LogitTransform(2.0, None)):
        assert transform.logits(cut).item() == -math.inf
    assert LogitTransform(1.0, 5.0).slopes(cut).item() == 0


def check_passes(backend, dtype, columns, inverse_taus, transform):
    """Both passes of a kernel over rows that hold x, with nothing left in some, against fp64."""
    make = torch.Generator().manual_seed(columns)
    x = torch.randn(9, columns, generator=make) * 8
    x[:, :7] = float("-inf")
    x[3] = float("-inf")
    x[4, : columns - 3] = float("-inf")
    x[5] += 30
    x[6] *= 4
    x[7] /= 1000
    x = x.to(dtype)
    exact = torch.where(x == -math.inf, -math.inf, transform.logits(x.double()))
    m, sums = backend.max_and_sums(x, inverse_taus, transform)
    torch.testing.assert_close(m.double(), exact.amax(-1), rtol=1e-6, atol=1e-7)
    shift = torch.where(m == -math.inf, 0.0, m)
    scales = torch.linspace(-1, 2, len(inverse_taus) * 9).view(len(inverse_taus), 9).to(m.dtype)
    want = torch.zeros_like(exact)
    # a logit of this size is rounded by so much before it is divided by a temperature below 1
    rounding = 4 * torch.finfo(m.dtype).eps * shift.abs().max().item() * max(inverse_taus)
    for t, inverse_tau in enumerate(inverse_taus):
        terms = ((exact - shift.double().unsqueeze(-1)) * inverse_tau).exp()
        torch.testing.assert_close(sums[t].double(), terms.sum(-1), rtol=1e-5 + rounding, atol=0)
        want += scales[t].double().unsqueeze(-1) * terms
    want *= transform.slopes(x.double())
    backend.to_gradient_(x, shift, scales, inverse_taus, transform)
    rtol = {torch.float64: 1e-6, torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype] + rounding
    torch.testing.assert_close(x.double(), want, rtol=rtol, atol=1e-6)


KERNEL_TRANSFORMS = [LogitTransform(1.0, 5.0), LogitTransform(0.3, 30.0), LogitTransform(1.7)]
TEMPERATURES = [(1.0,), (2.0,), (20.0, 1.0)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_eager_passes(dtype, monkeypatch):
    for block_bytes in (1, 100_000, 1 << 30):  # one row, a few, all of them
        monkeypatch.setattr(eager, "CPU_BLOCK_BYTES", block_bytes)
        for inverse_taus, transform in itertools.product(TEMPERATURES, KERNEL_TRANSFORMS):
            check_passes(eager, dtype, 499, inverse_taus, transform)


@pytest.fixture
def nothing_falls_back(caplog):
    """The compiler with all its variants to spare, and no word of giving up."""
    if not compiled.available("cpu"):
        pytest.skip("torch.compile is disabled or has no tool chain here")
    torch._dynamo.reset()
    yield
    given_up = [r.getMessage() for r in caplog.records if r.name == compiled.logger.name]
    assert not given_up


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_passes(dtype, nothing_falls_back):
    for inverse_taus, transform in itertools.product(TEMPERATURES, KERNEL_TRANSFORMS):
        check_passes(compiled, dtype, 499, inverse_taus, transform)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["forward_kl", "jsd"])
def test_compiled_heads(objective, nothing_falls_back):
    case = hot().with_options(objective=objective, beta=0.3, ce_weight=0.25)
    upstream = upstream_of(case)
    compared = [(heads[-1], plain) for plain, heads in map(with_transform, TRANSFORMS)]
    for pair in PAIRS:
        plain, ours = online(*pair, "in_forward")
        compared.append((ours, plain))
    with kernels.use_backend("compiled"):
        for ours, plain in compared:
            truth = run(plain, case, torch.float64, upstream)
            yardstick = run(plain, case, torch.float32, upstream)
            got = run(ours, case, torch.float32, upstream)
            assert_close(got, truth, yardstick, torch.float32, 4)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_without_a_transform_nothing_changes(head):
    """Logits that a host capped itself: no option, no second cap."""
    case = make_case()
    plain, heads = with_transform({})
    want, got = (run(f, case, torch.float64, upstream_of(case)) for f in (plain, head))
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-12)
    assert LogitTransform.of(1.0, None) is None


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(logit_softcap=0.0), "logit_softcap must be greater than 0 .* None for no cap"),
        (dict(logit_softcap=-30.0), "logit_softcap must be greater than 0"),
        (dict(logit_softcap=math.inf), "logit_softcap must be greater than 0 and finite"),
        (dict(logit_scale=0.0), "logit_scale must be greater than 0"),
        (dict(logit_scale=math.nan), "logit_scale must be greater than 0"),
    ],
    ids=str,
)
def test_what_is_refused(options, message):
    case = make_case()
    logits = logits_of(case.hidden, case.weight, case.bias)
    with pytest.raises(ValueError, match=message):
        dense_kd_loss(logits, case.target, **options)
    with pytest.raises(ValueError, match=message):
        fused_chunked_kd_loss(case.hidden, case.weight, case.target, **options)
    with pytest.raises(ValueError, match=message):
        dense_online_kd_loss(logits, logits, **{f"teacher_{k}": v for k, v in options.items()})
