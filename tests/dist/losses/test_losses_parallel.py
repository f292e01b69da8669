"""Vocabulary shards on gloo ranks: loss and every gradient equal those of one rank.

One world of ranks runs all cases and goes on after one that fails, so that a failure names its case
and hides no other.

S sequence, B micro-batch, D hidden size, V vocabulary with padding, K support.
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


class World:
    """One rank of a world, with its parts of the inputs and the outcome of every case."""

    def __init__(self, rank):
        self.rank, self.ranks, self.group = rank, dist.get_world_size(), dist.group.WORLD
        self.failures = {}
        self.count = 0

    def part(self, *tensors):
        """This rank's chunk of each along its first dimension."""
        return [x.chunk(self.ranks)[self.rank] for x in tensors]

    def check(self, name, function, *args, **options):
        """Run a case on every rank at once; an assertion that fails is kept under its name.

        Any other error ends the world: the ranks would no longer be at the same collective.
        """
        self.count += 1
        try:
            function(*args, **options)
        except AssertionError as error:
            self.failures[name] = str(error)
        except Exception as error:
            raise RuntimeError(f"case {name!r} broke off") from error


def compare(world, got, want, sharded_sequence=False):
    """Assert that loss and gradients of this rank are those of one rank, all of them at once."""
    want = list(want)
    if sharded_sequence:
        (want[1],) = world.part(want[1])
    want[2:] = world.part(*want[2:])
    wrong = []
    for name, x, y in zip(("loss", "d_hidden", "d_weight", "d_bias"), got, want, strict=True):
        if not torch.allclose(x, y, rtol=1e-10, atol=1e-12):
            ratio = (x.norm() / y.norm()).item()
            wrong.append(f"{name} off by {(x - y).abs().max():.2e}, ratio {ratio:.3f}")
    assert not wrong, "; ".join(wrong)


def topk_cases(world):
    hidden, weight, bias, target, labels, upstream = make_inputs()
    w, b = world.part(weight, bias)

    def case(head, want):
        compare(world, evaluate(head, hidden, w, b, upstream), want)

    for objective, tail, temperature in itertools.product(
        ("forward_kl", "reverse_kl", "jsd"),
        ("none", "renormalize", "bucket"),
        (1.0, 2.0) if world.ranks == 2 else (2.0,),
    ):
        choice = dict(objective=objective, tail=tail, temperature=temperature)
        divergence = Divergence(**choice, beta=0.3, ce_weight=0.2)
        options = dict(divergence=divergence, labels=labels, vocab_size=REAL)
        want = evaluate(definition(target, options), hidden, weight, bias, upstream)
        options["tp_group"] = world.group
        for name, head in topk_heads(target, upstream, options).items():
            world.check(f"{name} {objective} {tail} τ={temperature}", case, head, want)


def online_cases(world):
    hidden, weight, bias, _, labels, upstream = make_inputs()
    make = torch.Generator().manual_seed(1)
    teacher = torch.randn(S, B, 7, generator=make, dtype=torch.float64)
    teacher_weight = torch.randn(V, 7, generator=make, dtype=torch.float64)
    w, b, tw = world.part(weight, bias, teacher_weight)
    part, teacher_part = world.part(hidden, teacher)
    y = teacher @ teacher_weight.T

    def case(head, want):
        compare(world, evaluate(head, hidden, w, b, upstream), want)

    def sequence_parallel(head, want):
        got = evaluate(head, part, w, b, upstream)
        compare(world, got, want, sharded_sequence=True)

    for objective, temperature in itertools.product(
        ("forward_kl", "reverse_kl", "jsd"), (1.0, 2.0)
    ):
        divergence = Divergence(
            objective=objective, temperature=temperature, beta=0.3, ce_weight=0.2
        )
        options = dict(divergence=divergence, labels=labels, vocab_size=REAL)
        want = evaluate(definition(y, options), hidden, weight, bias, upstream)
        options["tp_group"] = world.group

        def fused(teacher, options=options, **more):
            return lambda h, w, b: fused_online_kd_loss(
                h, w, teacher, tw, bias=b, chunk_size=3, **more, **options
            )

        def dense(h, w, b, options=options):
            return dense_online_kd_loss(logits_from(h, w, b), teacher @ tw.T, **options)

        name = f"online {objective} τ={temperature}"
        world.check(f"dense {name}", case, dense, want)
        world.check(f"recompute {name}", case, fused(teacher), want)
        in_forward = fused(teacher, gradient="in_forward", token_weights=upstream)
        world.check(f"in_forward {name}", case, in_forward, want)
        sharded = fused(teacher_part, sequence_parallel=True)
        world.check(f"sequence parallel {name}", sequence_parallel, sharded, want)


def transform_cases(world):
    """Models that scale or cap their logits, each its own way: offline and online."""
    hidden, weight, bias, target, labels, upstream = make_inputs()
    w, b = world.part(weight, bias)
    y = (hidden * 2) @ weight.T
    (tw,) = world.part(weight)
    divergence = Divergence(objective="jsd", tail="bucket", temperature=2.0, ce_weight=0.2)
    options = dict(divergence=divergence, labels=labels, vocab_size=REAL)
    chunks = dict(chunk_size=3, token_weights=upstream, tp_group=world.group)

    def transformed(teacher, scale, softcap):
        function = reference.topk_loss if teacher is target else reference.full_loss

        def loss_of(hidden, weight, bias):
            z = reference.transformed(hidden @ weight.T + bias, scale, softcap)
            return function(z, teacher, divergence, labels, REAL)

        return loss_of

    def case(head, want):
        compare(world, evaluate(head, hidden, w, b, upstream), want)

    for scale, softcap in ((1.0, 2.0), (0.3, 1.5), (0.3, None)):
        name = f"scale {scale}, cap {softcap}"
        student = dict(logit_scale=scale, logit_softcap=softcap)
        capped_y = reference.transformed(y, 0.7, 3.0)
        both = dict(student, teacher_logit_scale=0.7, teacher_logit_softcap=3.0)
        want, want_online = (
            evaluate(transformed(teacher, scale, softcap), hidden, weight, bias, upstream)
            for teacher in (target, capped_y)
        )
        more = options | student | dict(tp_group=world.group)
        for head_name, head in topk_heads(target, upstream, more).items():
            world.check(f"{head_name} {name}", case, head, want)
        for gradient in ("recompute", "in_forward"):

            def online(h, w, b, more=chunks | options | both | dict(gradient=gradient)):
                return fused_online_kd_loss(h, w, hidden * 2, tw, bias=b, **more)

            world.check(f"online {gradient} {name}", case, online, want_online)


def sequence_parallel_cases(world):
    """Sharded hidden states, only some rows supervised, metrics, and the label-only loss."""
    hidden, weight, bias, target, labels, upstream = make_inputs()
    part, w, b = world.part(hidden, weight, bias)
    index = torch.tensor([1, 2, 5, 9, 12, 15])
    chosen = torch.zeros(S * B, dtype=torch.bool).index_fill_(0, index, True).view(S, B)
    divergence = Divergence(tail="bucket", ce_weight=0.2)
    options = dict(divergence=divergence, labels=labels, vocab_size=REAL)
    _, alone = dense_kd_loss(hidden @ weight.T + bias, target, return_metrics=True, **options)

    def case(gradient, some):
        weights = torch.where(chosen, upstream, 0.0) if some else upstream
        want = evaluate(definition(target, options), hidden, weight, bias, weights)
        if some:
            want[0] = torch.where(chosen, want[0], 0.0)
        reported = []

        def head(h, w, b):
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
                tp_group=world.group,
                return_metrics=True,
                **options,
            )
            reported.extend(metrics)
            return loss

        got = evaluate(head, part, w, b, weights)
        compare(world, got, want, sharded_sequence=True)
        for mine, theirs in zip(reported, alone, strict=True):
            torch.testing.assert_close(mine, torch.where(chosen, theirs, 0.0) if some else theirs)

    for gradient, some in itertools.product(("recompute", "in_forward"), (False, True)):
        rows = "some rows" if some else "all rows"
        world.check(f"sequence parallel {gradient}, {rows}", case, gradient, some)

    def labels_alone():
        logits = (hidden @ weight.T + bias)[..., :REAL]
        want = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        ).view(S, B)
        more = dict(bias=b, vocab_size=REAL, sequence_parallel=True, tp_group=world.group)
        torch.testing.assert_close(fused_cross_entropy(part, w, labels, **more), want)

    world.check("sequence parallel, labels alone", labels_alone)


def low_precision_cases(world):
    """bf16 shards: no worse than four times the plain bf16 loss of one rank."""
    hidden, weight, bias, target, _, upstream = make_inputs()
    whole = definition(target, dict(vocab_size=REAL))
    truth = evaluate(whole, hidden, weight, bias, upstream)
    hidden, weight, bias, target, _, upstream = make_inputs(torch.bfloat16)
    plain = evaluate(whole, hidden, weight, bias, upstream)
    w, b = world.part(weight, bias)

    def case(head):
        got = evaluate(head, hidden, w, b, upstream)
        for i, want in enumerate(truth):
            mine, floor = got[i].double(), (plain[i].double() - want).abs().max()
            (want,) = world.part(want) if i >= 2 else (want,)
            bound = 4 * floor + 8 * torch.finfo(torch.bfloat16).eps * want.abs().max()
            error = (mine - want).abs().max()
            assert error <= bound, f"output {i}: error {error:.2e}, bound {bound:.2e}"

    options = dict(vocab_size=REAL, tp_group=world.group)
    for name, head in topk_heads(target, upstream, options).items():
        world.check(f"{name} bf16", case, head)


def automatic_chunk_cases(world):
    """chunk_size auto where shards differ in padding: every rank takes chunks of the same rows.

    A chunk's logits may take two rows and a half of a whole shard, so that a rank with fewer real
    columns could take more rows than the others. Ranks that disagree would meet in collectives of
    different sizes.
    """
    hidden, weight, bias, target, labels, upstream = make_inputs()
    w, b = world.part(weight, bias)
    budget = 5 * 8 * len(w) // 2
    divergence = Divergence(tail="bucket", ce_weight=0.2)
    options = dict(divergence=divergence, labels=labels, vocab_size=REAL)
    automatic = dict(chunk_size="auto", memory_budget_bytes=budget, tp_group=world.group)
    y = (hidden * 2) @ weight.T

    def case(head, want):
        compare(world, evaluate(head, hidden, w, b, upstream), want)

    want = evaluate(definition(target, options), hidden, weight, bias, upstream)
    want_online = evaluate(definition(y, options), hidden, weight, bias, upstream)
    for gradient in ("recompute", "in_forward"):
        more = dict(options, **automatic, gradient=gradient, token_weights=upstream)

        def fused(h, w, b, more=more):
            return fused_chunked_kd_loss(h, w, target, bias=b, **more)

        def online(h, w, b, more=more):
            (tw,) = world.part(weight)
            return fused_online_kd_loss(h, w, hidden * 2, tw, bias=b, **more)

        world.check(f"{gradient}, chunk_size auto, padded", case, fused, want)
        world.check(f"{gradient} online, chunk_size auto, padded", case, online, want_online)


def refusal_cases(world):
    hidden, weight, *_ = make_inputs()

    def shards_of_other_tokens():
        with pytest.raises(ValueError, match="make_vocab_size_divisible_by"):
            fused_online_kd_loss(
                hidden, weight, hidden, weight[:-2], tp_group=world.group, vocab_size=REAL
            )

    def vocabulary_beyond_the_rows():
        labels = torch.zeros(S, B, dtype=torch.int64)
        with pytest.raises(ValueError, match="does not fit"):
            fused_cross_entropy(
                hidden, weight, labels, tp_group=world.group, vocab_size=V * world.ranks + 1
            )

    world.check("shards of other tokens", shards_of_other_tokens)
    world.check("vocabulary beyond the rows", vocabulary_beyond_the_rows)


def all_cases(rank):
    """The number of cases that this rank ran, and the message of every one that failed."""
    world = World(rank)
    for cases in (
        topk_cases,
        online_cases,
        transform_cases,
        sequence_parallel_cases,
        low_precision_cases,
        automatic_chunk_cases,
        refusal_cases,
    ):
        cases(world)
        dist.barrier()
    return world.count, world.failures


@pytest.mark.parametrize("ranks, expected", [(2, 129), (4, 93)])
def test_shards_equal_one_rank(ranks, expected):
    outcomes = run_ranks(ranks, all_cases)
    assert [count for count, _ in outcomes] == [expected] * ranks
    failed = [
        f"TP {ranks}, rank {rank}, {name}: {message}"
        for rank, (_, failures) in enumerate(outcomes)
        for name, message in failures.items()
    ]
    assert not failed, "\n".join(failed)


def two_wrong_cases(rank):
    world = World(rank)

    def differ(by):
        compare(world, [torch.full((4,), by)] * 4, [torch.zeros(4)] * 2 + [torch.zeros(8)] * 2)

    for name, by in {"first": 1.0, "right": 0.0, "third": 2.0}.items():
        world.check(name, differ, by)
    return world.failures


def test_every_failure_names_its_case():
    for failures in run_ranks(2, two_wrong_cases):
        assert list(failures) == ["first", "third"]
        assert "loss off by 1.00e+00" in failures["first"]
        assert "d_bias off by 2.00e+00" in failures["third"]


def fail_on_one(rank):
    if rank == 1:
        raise ArithmeticError("only rank one")
    dist.barrier()


def test_helper_reports_the_failing_rank():
    with pytest.raises(Exception, match="only rank one"):
        run_ranks(2, fail_on_one)
