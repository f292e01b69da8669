"""One object for which loss, one registry for its objectives, and a unit registered from outside.

s sequence, b micro-batch, h hidden, v vocabulary, n rows of a chunk, k support, vp = v/tp.
"""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loss_cases import HEADS, logits_of, make_case, plain, run, upstream_of

from megatron_kd.losses import (
    Divergence,
    dense_kd_loss,
    dense_online_kd_loss,
    fused_chunked_kd_loss,
    fused_online_kd_loss,
    kernels,
    reference,
)
from megatron_kd.losses.divergence import OBJECTIVES
from megatron_kd.losses.objectives import Objective
from megatron_kd.losses.objectives.jsd import JSD


def squared_on_support(student, teacher, divergence):
    """Half the sum of (q - p)², scaled by beta: no built-in objective has such values."""
    return divergence.beta * (student.q - teacher.p).square().sum(-1) / 2


def squared_terms(p, log_p, q, log_q, divergence):
    return divergence.beta * (q - p).square() / 2


def squared_row_sums(log_q, log_p, divergence):
    """The loss; then, for the gradient, sum q (q - p) and one sum that nobody needs."""
    q, p = log_q.exp(), log_p.exp()
    loss = divergence.beta * (q - p).square().sum(-1) / 2
    return loss, (q * (q - p)).sum(-1), q.sum(-1)


def squared_gradient(log_q, log_p, sums, divergence):
    q, p = log_q.exp(), log_p.exp()
    return divergence.beta * q * (q - p - sums[1].unsqueeze(-1))


SQUARED = Objective(
    on_support=squared_on_support,
    terms=squared_terms,
    row_sums=squared_row_sums,
    gradient=squared_gradient,
    sums=3,
)


@pytest.fixture
def squared(monkeypatch):
    """An objective that this package knows nothing of, by its registered name."""
    monkeypatch.setitem(OBJECTIVES, "squared", SQUARED)
    return Divergence(objective="squared", beta=0.7, temperature=1.5, ce_weight=0.2)


def by_hand(p, z, divergence, labels):
    """The loss [s, b] of `SQUARED` in plain PyTorch; p and z [s, b, ...] of one vocabulary."""
    q = torch.softmax(z / divergence.temperature, -1)
    kd = divergence.beta * (q - p).square().sum(-1) / 2
    picked = torch.log_softmax(z, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (1 - divergence.ce_weight) * kd - divergence.ce_weight * picked


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_an_objective_from_outside_runs_through_every_head(squared, head):
    case = replace(make_case(temperature=1.5, captured=True), divergence=squared)
    upstream = upstream_of(case)
    log_p = case.target.logprobs.double() / 1.5 - case.target.log_z_tau.double().unsqueeze(-1)

    def whole(hidden, weight, bias, case):
        z = logits_of(hidden, weight, bias)
        q = torch.softmax(z / 1.5, -1).gather(-1, case.target.ids)
        kd = squared.beta * (q - log_p.exp()).square().sum(-1) / 2
        picked = torch.log_softmax(z, -1).gather(-1, case.labels.unsqueeze(-1)).squeeze(-1)
        return 0.8 * kd - 0.2 * picked

    want = run(whole, case, torch.float64, upstream)
    got = run(head, case, torch.float64, upstream)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11)
    logits = logits_of(case.hidden, case.weight, case.bias)
    defined = reference.topk_loss(logits, case.target, squared, case.labels)
    torch.testing.assert_close(defined, want["loss"])


@pytest.mark.parametrize("backend", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("head", ["dense", "recompute", "in_forward"])
def test_an_objective_from_outside_runs_online(squared, head, backend):
    case = make_case()
    make = torch.Generator().manual_seed(3)
    teacher = torch.randn(7, 2, 5, generator=make, dtype=torch.float64)
    teacher_weight = torch.randn(53, 5, generator=make, dtype=torch.float64)
    y = teacher @ teacher_weight.T
    p = torch.softmax(y / 1.5, -1)
    options = dict(divergence=squared, labels=case.labels)

    def ours(hidden, weight, bias, case):
        with kernels.use_backend(backend):
            if head == "dense":
                return dense_online_kd_loss(logits_of(hidden, weight, bias), y, **options)
            return fused_online_kd_loss(
                hidden,
                weight,
                teacher,
                teacher_weight,
                bias=bias,
                chunk_size=3,
                gradient=head,
                token_weights=case.token_weights,
                **options,
            )

    def whole(hidden, weight, bias, case):
        return by_hand(p, logits_of(hidden, weight, bias), squared, case.labels)

    upstream = upstream_of(case)
    want = run(whole, case, torch.float64, upstream)
    got = run(ours, case, torch.float64, upstream)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11)
    logits = logits_of(case.hidden, case.weight, case.bias)
    torch.testing.assert_close(reference.full_loss(logits, y, squared, case.labels), want["loss"])


def blocks_of_page():
    """The Python of docs/objectives.md, block by block."""
    page = Path(__file__).parents[3] / "docs" / "objectives.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_pages_objective_is_total_variation(monkeypatch):
    """Documented code as it stands: offline against its definition, online against autograd."""
    monkeypatch.setitem(OBJECTIVES, "total_variation", None)  # taken out again afterwards
    exec(blocks_of_page()[1], {})
    case = make_case(temperature=1.5, captured=True).with_options(
        objective="total_variation", tail="bucket"
    )
    upstream = upstream_of(case)
    want = run(plain, case, torch.float64, upstream)
    for head in HEADS:
        got = run(head, case, torch.float64, upstream)
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11)
    z = logits_of(case.hidden, case.weight, case.bias).requires_grad_()
    y = logits_of(case.hidden * 2, case.weight, case.bias)
    loss = dense_online_kd_loss(z, y, divergence=case.divergence)
    expected = (torch.softmax(z / 1.5, -1) - torch.softmax(y / 1.5, -1)).abs().sum(-1) / 2
    torch.testing.assert_close(loss, expected)
    (got,), (wanted,) = (torch.autograd.grad((x * upstream).sum(), z) for x in (loss, expected))
    torch.testing.assert_close(got, wanted)


def test_the_pages_call_runs():
    case = make_case()
    names = dict(
        hidden_states=case.hidden.clone().requires_grad_(),
        output_weight=case.weight,
        topk_ids=case.target.ids,
        topk_logprobs=case.target.logprobs,
        labels=case.labels,
        loss_mask=case.token_weights,
        tp_group=None,
    )
    exec(blocks_of_page()[0], names)
    mixed = 0.9 * names["metrics"].divergence + 0.1 * names["metrics"].lm_loss
    torch.testing.assert_close(names["loss"], mixed)
    assert torch.isfinite(names["hidden_states"].grad).all()


@pytest.mark.parametrize("missing", ["row_sums", "gradient"])
def test_an_objective_without_full_sums_is_refused_online_by_name(missing, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "top_only", replace(SQUARED, **{missing: None}))
    case, divergence = make_case(), Divergence(objective="top_only")
    logits = logits_of(case.hidden, case.weight, case.bias)
    assert torch.isfinite(dense_kd_loss(logits, case.target, divergence=divergence)).all()
    with pytest.raises(ValueError, match="objective top_only .* truncated teacher only"):
        dense_online_kd_loss(logits, logits, divergence=divergence)
    with pytest.raises(ValueError, match="objective top_only .* truncated teacher only"):
        fused_online_kd_loss(
            case.hidden, case.weight, case.hidden, case.weight, divergence=divergence
        )


def test_an_objective_without_a_definition_has_no_reference(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "undefined", replace(SQUARED, terms=None))
    case, divergence = make_case(), Divergence(objective="undefined")
    logits = logits_of(case.hidden, case.weight, case.bias)
    with pytest.raises(ValueError, match="objective undefined has no terms"):
        reference.topk_loss(logits, case.target, divergence)


def test_a_name_that_is_not_registered_is_refused_where_it_enters():
    with pytest.raises(ValueError, match="objective must be one of forward_kl.*did you mean jsd"):
        Divergence(objective="jds")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(objective="jsd", beta=0.0), "beta must lie strictly between 0 and 1 for jsd"),
        (dict(objective="jsd", beta=1.0), "beta must lie strictly between 0 and 1 for jsd"),
        (dict(beta=1.01), r"beta must lie in \[0, 1\]"),
        (dict(beta=float("nan")), r"beta must lie in \[0, 1\]"),
        (dict(ce_weight=-0.1), r"ce_weight must lie in \[0, 1\]"),
        (dict(temperature=0.0), "temperature must be greater than 0"),
        (dict(temperature=float("inf")), "temperature .* finite"),
        (dict(temperature=float("nan")), "temperature .* finite"),
        (dict(tail="drop"), "tail must be one of none, renormalize, bucket"),
        (dict(tail="renormalise"), "tail must .* did you mean renormalize"),
    ],
    ids=str,
)
def test_what_a_divergence_refuses(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Divergence(**options)


def test_a_unit_refuses_what_it_has_no_loss_for_under_any_name(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "mixed", JSD)
    with pytest.raises(ValueError, match="^beta must lie strictly between 0 and 1 for mixed"):
        Divergence(objective="mixed", beta=0.0)
    assert Divergence(objective="mixed", beta=0.3).beta == 0.3


def test_the_ends_of_beta_are_fine_where_nothing_reads_it():
    for beta in (0.0, 1.0):
        assert Divergence(objective="reverse_kl", beta=beta).beta == beta


@pytest.mark.parametrize("squared_temperature", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("online", [False, True])
def test_metrics_carry_the_unmixed_divergence(online, alpha, squared_temperature):
    """At every share of cross-entropy, alone of it included, and for rows that are not chosen 0."""
    case = make_case(temperature=2.0, captured=True)
    divergence = Divergence(
        objective="jsd",
        beta=0.3,
        temperature=2.0,
        temperature_squared=squared_temperature,
        ce_weight=alpha,
    )
    alone = replace(divergence, ce_weight=0.0)
    index = torch.tensor([0, 3, 4, 9])
    options = dict(labels=case.labels, bias=case.bias, supervised_index=index, chunk_size=1)
    hidden, weight = case.hidden, case.weight

    def loss_of(divergence, **more):
        if online:
            teacher = (hidden * 2, weight)
            return fused_online_kd_loss(
                hidden, weight, *teacher, divergence=divergence, **options, **more
            )
        return fused_chunked_kd_loss(
            hidden, weight, case.target, divergence=divergence, **options, **more
        )

    loss, metrics = loss_of(divergence, return_metrics=True)
    want = loss_of(alone)
    torch.testing.assert_close(metrics.divergence, want, rtol=0, atol=0)
    assert want.flatten()[index].abs().min() > 0
    torch.testing.assert_close(loss, (1 - alpha) * want + alpha * metrics.lm_loss)
    assert metrics.divergence.data_ptr() != loss.data_ptr()
    before = metrics.divergence.clone()
    loss.div_(3)  # a host divides the loss where it lies
    assert torch.equal(metrics.divergence, before)


def test_the_options_of_a_loss_need_no_torch():
    """A recipe is checked before anything heavy is imported."""
    program = (
        "import sys; import megatron_kd.config, megatron_kd.losses, megatron_kd.losses.divergence;"
        "megatron_kd.losses.Divergence(objective='jsd'); dir(megatron_kd.losses);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
