"""Vocabulary shards on gloo ranks: loss and every gradient equal those of one rank.

Letters: S sequence, B micro-batch, D hidden, V vocabulary, K support.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks

from megatron_kd.losses import (
    Divergence,
    TopKTarget,
    dense_kd_loss,
    dense_online_kd_loss,
    fused_chunked_kd_loss,
    fused_cross_entropy,
    fused_online_kd_loss,
    reference,
    sparse_chunked_kd_loss,
)

S, B, D, V, K, REAL = 8, 2, 12, 24, 5, 17  # on four ranks the last holds padding alone


def make_inputs(dtype=torch.float64):
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(S, B, D, generator=make).bfloat16().to(dtype)
    weight = torch.randn(V, D, generator=make).bfloat16().to(dtype)
    bias = torch.randn(V, generator=make).bfloat16().to(dtype)
    teacher = torch.log_softmax(torch.randn(S, B, REAL, generator=make, dtype=torch.float64), -1)
    ids = torch.rand(S, B, REAL, generator=make).argsort(-1)[..., :K]
    ids[..., 0] = torch.where((ids == 0).any(-1), ids[..., 0], 0)  # column 0 of the first shard
    logprobs = teacher.gather(-1, ids)
    ids[2, 1, 3:], logprobs[2, 1, 3:] = -1, float("-inf")
    labels = torch.randint(0, REAL, (S, B), generator=make)
    labels[3, 0] = -100
    upstream = torch.rand(S, B, generator=make, dtype=torch.float64)
    upstream[0] = 0
    target = TopKTarget(ids, logprobs, torch.logsumexp(teacher / 2, -1))
    return hidden, weight, bias, target, labels, upstream


def evaluate(loss_of, hidden, weight, bias, upstream):
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    loss = loss_of(*leaves)
    (loss * upstream.to(loss.dtype)).sum().backward()
    return [loss.detach(), *(x.grad for x in leaves)]


def definition(teacher, options):
    """The loss of one rank, from whole logits and `reference`; teacher: a target, or logits."""
    divergence = options.get("divergence", Divergence())
    labels, vocab_size = options.get("labels"), options["vocab_size"]
    function = reference.topk_loss if isinstance(teacher, TopKTarget) else reference.full_loss

    def loss_of(hidden, weight, bias):
        logits = hidden @ weight.T + bias
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return function(logits, teacher, divergence, labels, vocab_size)

    return loss_of


def logits_from(hidden, weight, bias):
    """Column-parallel logits as a host forms them: its layer sums the gradient of hidden."""
    return _CopyToRegion.apply(hidden) @ weight.T + bias


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if dist.get_world_size() > 1:
            dist.all_reduce(gradient)
        return gradient


def topk_heads(target, upstream, options):
    def logits_head(function, **more):
        return lambda h, w, b: function(logits_from(h, w, b), target, **more, **options)

    def fused(**more):
        return lambda h, w, b: fused_chunked_kd_loss(
            h, w, target, bias=b, chunk_size=3, **more, **options
        )

    return {
        "dense": logits_head(dense_kd_loss),
        "sparse": logits_head(sparse_chunked_kd_loss, chunk_size=3),
        "recompute": fused(),
        "in_forward": fused(gradient="in_forward", token_weights=upstream),
    }


def compare(got, want, rank, ranks, context, sharded_sequence=False):
    want = list(want)
    if sharded_sequence:
        want[1] = want[1].chunk(ranks)[rank]
    want[2], want[3] = want[2].chunk(ranks)[rank], want[3].chunk(ranks)[rank]
    for name, x, y in zip(("loss", "d_hidden", "d_weight", "d_bias"), got, want, strict=True):
        assert torch.allclose(x, y, rtol=1e-10, atol=1e-12), (
            f"{context} {name}: off by {(x - y).abs().max():.2e}, "
            f"ratio {(x.norm() / y.norm()).item():.3f}"
        )


def topk_on_rank(rank):
    ranks, group = dist.get_world_size(), dist.group.WORLD
    hidden, weight, bias, target, labels, upstream = make_inputs()
    w, b = weight.chunk(ranks)[rank], bias.chunk(ranks)[rank]
    combinations = itertools.product(
        ("forward_kl", "reverse_kl", "jsd"),
        ("none", "renormalize", "bucket"),
        (1.0, 2.0) if ranks == 2 else (2.0,),
    )
    for objective, tail, temperature in combinations:
        choice = dict(objective=objective, tail=tail, temperature=temperature)
        divergence = Divergence(**choice, beta=0.3, ce_weight=0.2)
        options = dict(divergence=divergence, labels=labels, vocab_size=REAL)
        want = evaluate(definition(target, options), hidden, weight, bias, upstream)
        for name, head in topk_heads(target, upstream, dict(options, tp_group=group)).items():
            got = evaluate(head, hidden, w, b, upstream)
            compare(got, want, rank, ranks, f"TP {ranks} {name} {objective} {tail} {temperature}")
    return "done"


def online_on_rank(rank):
    ranks, group = dist.get_world_size(), dist.group.WORLD
    hidden, weight, bias, _, labels, upstream = make_inputs()
    make = torch.Generator().manual_seed(1)
    teacher = torch.randn(S, B, 7, generator=make, dtype=torch.float64)
    teacher_weight = torch.randn(V, 7, generator=make, dtype=torch.float64)
    w, b, tw = (x.chunk(ranks)[rank] for x in (weight, bias, teacher_weight))
    for objective, temperature in itertools.product(
        ("forward_kl", "reverse_kl", "jsd"), (1.0, 2.0)
    ):
        choice = dict(objective=objective, temperature=temperature)
        divergence = Divergence(**choice, beta=0.3, ce_weight=0.2)
        options = dict(divergence=divergence, labels=labels, vocab_size=REAL)
        y = teacher @ teacher_weight.T
        want = evaluate(definition(y, options), hidden, weight, bias, upstream)
        options["tp_group"] = group

        def fused(h, w, b, teacher=teacher, options=options, **more):
            return fused_online_kd_loss(h, w, teacher, tw, bias=b, chunk_size=3, **more, **options)

        heads = {
            "dense": lambda h, w, b, options=options: dense_online_kd_loss(
                logits_from(h, w, b), teacher @ tw.T, **options
            ),
            "recompute": fused,
            "in_forward": lambda h, w, b, fused=fused: fused(
                h, w, b, gradient="in_forward", token_weights=upstream
            ),
        }
        for name, head in heads.items():
            got = evaluate(head, hidden, w, b, upstream)
            compare(got, want, rank, ranks, f"TP {ranks} online {name} {objective} {temperature}")
        part = hidden.chunk(ranks)[rank]
        got = evaluate(
            lambda h, w, b, fused=fused: fused(
                h, w, b, teacher=teacher.chunk(ranks)[rank], sequence_parallel=True
            ),
            part,
            w,
            b,
            upstream,
        )
        compare(got, want, rank, ranks, "online, sequence parallel", sharded_sequence=True)
    return "done"


def sequence_parallel_on_rank(rank):
    """Sharded hidden states, only some rows supervised, metrics, and the label-only head."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    hidden, weight, bias, target, labels, upstream = make_inputs()
    w, b = weight.chunk(ranks)[rank], bias.chunk(ranks)[rank]
    part = hidden.chunk(ranks)[rank]
    index = torch.tensor([1, 2, 5, 9, 12, 15])
    chosen = torch.zeros(S * B, dtype=torch.bool).index_fill_(0, index, True).view(S, B)
    options = dict(divergence=Divergence(tail="bucket"), labels=labels, vocab_size=REAL)
    for gradient, some in itertools.product(("recompute", "in_forward"), (False, True)):
        weights = torch.where(chosen, upstream, 0.0) if some else upstream
        want = evaluate(definition(target, options), hidden, weight, bias, weights)
        if some:
            want[0] = torch.where(chosen, want[0], 0.0)

        def head(h, w, b, gradient=gradient, some=some, weights=weights):
            loss, metrics = fused_chunked_kd_loss(
                h,
                w,
                target,
                bias=b,
                chunk_size=3,
                gradient=gradient,
                token_weights=weights,
                supervised_index=index if some else None,
                sequence_parallel=True,
                tp_group=group,
                return_metrics=True,
                **options,
            )
            _, alone = dense_kd_loss(
                hidden @ weight.T + bias, target, return_metrics=True, **options
            )
            for mine, theirs in zip(metrics, alone, strict=True):
                expected = torch.where(chosen, theirs, 0.0) if some else theirs
                torch.testing.assert_close(mine, expected)
            return loss

        got = evaluate(head, part, w, b, weights)
        compare(got, want, rank, ranks, f"SP {gradient} {some}", sharded_sequence=True)

    logits = (hidden @ weight.T + bias)[..., :REAL]
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    ).view(S, B)
    more = dict(bias=b, vocab_size=REAL, sequence_parallel=True, tp_group=group)
    torch.testing.assert_close(fused_cross_entropy(part, w, labels, **more), want)
    return "done"


def low_precision_on_rank(rank):
    """bf16 shards: no worse than four times the plain bf16 loss of one rank."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    hidden, weight, bias, target, _, upstream = make_inputs()
    whole = definition(target, dict(vocab_size=REAL))
    truth = evaluate(whole, hidden, weight, bias, upstream)
    hidden, weight, bias, target, _, upstream = make_inputs(torch.bfloat16)
    plain = evaluate(whole, hidden, weight, bias, upstream)
    w, b = weight.chunk(ranks)[rank], bias.chunk(ranks)[rank]
    options = dict(vocab_size=REAL, tp_group=group)
    for name, head in topk_heads(target, upstream, options).items():
        got = evaluate(head, hidden, w, b, upstream)
        for i, want in enumerate(truth):
            mine, floor = got[i].double(), (plain[i].double() - want).abs().max()
            want = want.chunk(ranks)[rank] if i >= 2 else want
            bound = 4 * floor + 8 * torch.finfo(torch.bfloat16).eps * want.abs().max()
            assert (mine - want).abs().max() <= bound, f"{name} {i}"
    return "done"


def mismatched_online_on_rank(rank):
    hidden, weight, *_ = make_inputs()
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="make_vocab_size_divisible_by"):
        fused_online_kd_loss(hidden, weight, hidden, weight[:-2], tp_group=group, vocab_size=REAL)
    with pytest.raises(ValueError, match="does not fit"):
        beyond = V * dist.get_world_size() + 1
        labels = torch.zeros(S, B, dtype=torch.int64)
        fused_cross_entropy(hidden, weight, labels, tp_group=group, vocab_size=beyond)
    return "done"


def everything_on_rank(rank):
    for check in (
        topk_on_rank,
        online_on_rank,
        sequence_parallel_on_rank,
        low_precision_on_rank,
        mismatched_online_on_rank,
    ):
        check(rank)
        dist.barrier()
    return "done"


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_equal_one_rank(ranks):
    assert run_ranks(ranks, everything_on_rank) == ["done"] * ranks


def fail_on_one(rank):
    if rank == 1:
        raise ArithmeticError("only rank one")
    dist.barrier()


def test_helper_reports_the_failing_rank():
    with pytest.raises(Exception, match="only rank one"):
        run_ranks(2, fail_on_one)
