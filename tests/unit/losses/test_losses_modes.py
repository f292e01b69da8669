"""The fused heads besides the mathematics: modes, frozen parts, the host's gradient buffers."""

import pytest
import torch
from loss_cases import make_case, plain, run
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_kd.losses import (
    Divergence,
    TopKTarget,
    dense_kd_loss,
    fused_chunked_kd_loss,
    fused_online_kd_loss,
    sparse_chunked_kd_loss,
    topk_loss,
)
from megatron_kd.losses.vocab_parallel import VocabShard


class Watch(TorchDispatchMode):
    """Counts operators by name, and matrix products."""

    PRODUCTS = ("aten.mm", "aten.addmm", "aten.addmm_")

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__str__()
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self):
        return sum(self.calls.get(name, 0) for name in self.PRODUCTS)


def leaves(case, dtype=torch.float32):
    return [x.to(dtype, copy=True).requires_grad_() for x in (case.hidden, case.weight, case.bias)]


def fused(case, hidden, weight, bias=None, **options):
    return fused_chunked_kd_loss(
        hidden, weight, case.target, **dict(dict(bias=bias, chunk_size=4), **options)
    )


@pytest.mark.parametrize(
    "options, trained, evaluated",
    [
        (dict(gradient="recompute"), 4, 1),
        (dict(gradient="in_forward", weights=True), 3, 1),
        (dict(gradient="auto", weights=True), 3, 1),
        (dict(gradient="auto"), 4, 1),
    ],
)
def test_number_of_products(options, trained, evaluated):
    """Per chunk of 4 positions; 7 positions are two chunks."""
    case = make_case()
    options = dict(options)
    weights = torch.ones(7, 2) if options.pop("weights", False) else None
    hidden, weight, _ = leaves(case)
    with Watch() as watch:
        fused(case, hidden, weight, token_weights=weights, **options).sum().backward()
    assert watch.products == 2 * trained
    with Watch() as watch, torch.no_grad():
        fused(case, hidden, weight, token_weights=weights, **options)
    assert watch.products == 2 * evaluated
    with Watch() as watch:
        fused(case, hidden.detach(), weight.detach(), token_weights=weights, **options)
    assert watch.products == 2 * evaluated


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_parts_cost_no_product(frozen, gradient):
    case = make_case()
    hidden, weight, bias = leaves(case)
    want = run(plain, case, torch.float32, torch.ones(7, 2))
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    with Watch() as watch:
        loss = fused(case, hidden, weight, bias, gradient=gradient, token_weights=torch.ones(7, 2))
        loss.sum().backward()
    assert watch.products == 2 * (3 if gradient == "recompute" else 2)
    alive = weight if frozen == "hidden" else hidden
    name = "d_weight" if frozen == "hidden" else "d_hidden"
    torch.testing.assert_close(alive.grad.double(), want[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias.grad.double(), want["d_bias"], rtol=1e-4, atol=1e-5)


def test_in_forward_equals_recompute_and_scales():
    case = make_case()
    weights = case.token_weights
    for scale in (1.0, -0.003, 4096.0):
        gradients = []
        for gradient in ("recompute", "in_forward"):
            inputs = leaves(case)
            loss = fused(case, *inputs, gradient=gradient, token_weights=weights)
            ((loss * weights).sum() * scale).backward()
            gradients.append([x.grad for x in inputs])
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * abs(scale))


def test_in_forward_refuses_another_upstream_gradient_with_nan():
    case = make_case()
    inputs = leaves(case)
    loss = fused(case, *inputs, gradient="in_forward", token_weights=case.token_weights)
    (loss * case.token_weights.roll(1, 0)).sum().backward()
    for x in inputs:
        assert torch.isnan(x.grad).all()


def test_in_forward_refuses_a_second_backward_pass():
    case = make_case()
    inputs = leaves(case)
    loss = fused(case, *inputs, gradient="in_forward", token_weights=torch.ones(7, 2)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()
    loss = fused(case, *inputs).sum()
    loss.backward(retain_graph=True)
    first = inputs[1].grad.clone()
    loss.backward()
    torch.testing.assert_close(inputs[1].grad - first, first / 2, rtol=1e-4, atol=1e-6)


def test_fp16_is_refused_in_forward_only():
    case = make_case()
    inputs = leaves(case, torch.float16)
    with pytest.raises(ValueError, match="loss scaling"):
        fused(case, *inputs, gradient="in_forward", token_weights=torch.ones(7, 2))
    auto = fused(case, *inputs, gradient="auto", token_weights=torch.ones(7, 2))
    (auto.sum() * 1024).backward()
    assert all(torch.isfinite(x.grad).all() for x in inputs)


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
@pytest.mark.parametrize("online", [False, True])
def test_only_supervised_rows_are_projected(online, gradient):
    case = make_case(positions=11, batch=3)
    mask = torch.zeros(33)
    index = torch.tensor([2, 3, 7, 8, 20, 31])
    mask[index] = torch.rand(6, generator=torch.Generator().manual_seed(0)) + 0.5
    mask = mask.view(11, 3)
    divergence = Divergence(ce_weight=0.3)
    options = dict(divergence=divergence, labels=case.labels, chunk_size=1, gradient=gradient)

    def loss_of(hidden, weight, bias, **more):
        rest = dict(options, bias=bias, token_weights=mask, return_metrics=True, **more)
        if online:
            return fused_online_kd_loss(
                hidden, weight, hidden.detach() * 2, weight.detach(), **rest
            )
        return fused_chunked_kd_loss(hidden, weight, case.target, **rest)

    some, all_rows = leaves(case, torch.float64), leaves(case, torch.float64)
    with Watch() as watch:
        loss, metrics = loss_of(*some, supervised_index=index)
        (loss * mask).sum().backward()
    few = watch.products
    with Watch() as watch:
        want, want_metrics = loss_of(*all_rows)
        (want * mask).sum().backward()
    assert few * 11 == watch.products * 2  # chunks of three rows: 2 of 11
    chosen = mask > 0
    torch.testing.assert_close(loss, torch.where(chosen, want, 0.0))
    for got, expected in zip(metrics, want_metrics, strict=True):
        torch.testing.assert_close(got, torch.where(chosen, expected, 0.0))
    for x, y in zip(some, all_rows, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    assert (some[0].grad.flatten(0, 1)[~chosen.flatten()] == 0).all()


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
def test_no_supervised_row_at_all(gradient):
    case = make_case()
    inputs = leaves(case)
    loss = fused(
        case,
        *inputs,
        gradient=gradient,
        token_weights=torch.zeros(7, 2),
        supervised_index=torch.zeros(0, dtype=torch.int64),
    )
    loss.sum().backward() if gradient == "recompute" else (loss * 0).sum().backward()
    assert (loss == 0).all()
    assert all((x.grad == 0).all() for x in inputs)


def test_caller_logits_are_never_changed_unless_lent():
    case = make_case()
    for function in (dense_kd_loss, sparse_chunked_kd_loss):
        leaf = torch.randn(7, 2, 53, generator=torch.Generator().manual_seed(0))
        before = leaf.clone()
        logits = leaf.requires_grad_() * 1
        divergence = Divergence(ce_weight=0.1)
        function(logits, case.target, labels=case.labels, divergence=divergence).sum().backward()
        assert torch.equal(logits.detach(), before)
    logits = leaf * 1
    loss = sparse_chunked_kd_loss(logits, case.target, reuse_logits=True)
    assert torch.equal(logits.detach(), before)  # the forward pass leaves even lent ones alone
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr()


def test_lent_logits_that_are_needed_elsewhere_raise():
    case = make_case()
    logits = torch.randn(
        7, 2, 53, requires_grad=True
    ).exp()  # exp keeps its result for the backward
    loss = sparse_chunked_kd_loss(logits, case.target, reuse_logits=True).sum()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


@pytest.mark.parametrize("gradient", ["recompute", "in_forward"])
def test_no_value_travels_to_the_host(gradient, monkeypatch):
    """Nothing reads a tensor's value in either pass (ids are looked at on the CPU only)."""
    monkeypatch.setattr(VocabShard, "check_ids", lambda *_: None)
    monkeypatch.setattr(topk_loss, "check_distinct", lambda *_: None)
    case = make_case(temperature=2.0, captured=True)
    inputs = leaves(case)
    options = dict(token_weights=case.token_weights, gradient=gradient, labels=case.labels)
    index = torch.tensor([1, 4, 5])
    with Watch() as watch:
        loss, _ = fused(
            case,
            *inputs,
            divergence=Divergence(temperature=2.0, ce_weight=0.1, tail="bucket"),
            supervised_index=index,
            return_metrics=True,
            **options,
        )
        mask = torch.zeros(14).index_fill_(0, index, 1.0).view(7, 2)
        (loss * case.token_weights * mask).sum().backward()
    synchronising = {"aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal"}
    assert not synchronising & set(watch.calls)


def test_ids_beyond_the_vocabulary_become_nan_where_they_cannot_be_looked_at(monkeypatch):
    monkeypatch.setattr(VocabShard, "check_ids", lambda *_: None)
    case = make_case()
    ids = case.target.ids.clone()
    ids[3, 1, 0] = 53
    case.target = TopKTarget(ids, case.target.logprobs)
    loss = fused(case, *leaves(case))
    bad = torch.zeros(7, 2, dtype=torch.bool)
    bad[3, 1] = True
    assert torch.equal(torch.isnan(loss), bad)


def test_wrong_dtypes_and_shapes_are_explained():
    case = make_case()
    hidden, weight, bias = leaves(case)
    with pytest.raises(ValueError, match="autocast"):
        fused(case, hidden.bfloat16(), weight)
    with pytest.raises(ValueError, match="different layers"):
        fused(case, hidden[..., :3], weight)
    with pytest.raises(ValueError, match="transpose"):
        fused(case, hidden.transpose(0, 1), weight)
    with pytest.raises(ValueError, match="token_weights"):
        fused(case, hidden, weight, gradient="in_forward")
    with pytest.raises(ValueError, match="token_weights want"):
        fused(case, hidden, weight, token_weights=torch.ones(2, 7), gradient="in_forward")
    with pytest.raises(ValueError, match="recompute, in_forward, auto"):
        fused(case, hidden, weight, gradient="forward")
    with pytest.raises(ValueError, match="forward_kl, reverse_kl, jsd"):
        Divergence(objective="kl")
    with pytest.raises(ValueError, match="none, renormalize, bucket"):
        Divergence(tail="drop")
    with pytest.raises(ValueError, match="strictly between"):
        Divergence(objective="jsd", beta=1.0)
    with pytest.raises(ValueError, match="capture it"):
        fused(case, hidden, weight, divergence=Divergence(tail="bucket", temperature=2.0))
    with pytest.raises(ValueError, match="needs labels"):
        fused(case, hidden, weight, divergence=Divergence(ce_weight=0.5))
    with pytest.raises(ValueError, match="needs labels"):
        fused_online_kd_loss(hidden, weight, hidden, weight, divergence=Divergence(ce_weight=0.5))
    with pytest.raises(ValueError, match="chunk_size"):
        fused(case, hidden, weight, chunk_size=0)
    with pytest.raises(ValueError, match="supervised_index"):
        fused(case, hidden, weight, supervised_index=torch.ones(7, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="int32 or int64"):
        TopKTarget(case.target.ids.to(torch.int16), case.target.logprobs)
    with pytest.raises(ValueError, match="one shape"):
        TopKTarget(case.target.ids[..., :2], case.target.logprobs)
    with pytest.raises(ValueError, match="bias"):
        fused(case, hidden, weight, bias[:4])
