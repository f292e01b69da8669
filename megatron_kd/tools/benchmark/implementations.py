"""What can be measured: the bare products, this package's losses, and their alternatives.

Each takes `Inputs` and returns the mean loss in nats with its graph; implementations of one
quantity return the same number and the same gradients.

Shapes: s sequence (the micro-batch is 1), h hidden, v vocabulary, vp = v / tp.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_kd.losses import (
    dense_kd_loss,
    dense_online_kd_loss,
    fused_chunked_kd_loss,
    fused_cross_entropy,
    fused_online_kd_loss,
    sparse_chunked_kd_loss,
)
from megatron_kd.tools.benchmark import paper, peers
from megatron_kd.tools.benchmark.inputs import Inputs

BARE = "bare_products"


@dataclass(frozen=True)
class Implementation:
    title: str
    quantity: str
    """What is computed, and so compared: products (nothing but those), topk, online or labels."""

    products: int
    """[s, h] x [h, v] matrix products of one forward and backward pass, the teacher's included."""

    mean_loss: Callable[[Inputs], torch.Tensor | None]
    chunked: bool = True
    """Whether it takes a chunk size."""

    shards: bool = True
    """Whether it runs under vocabulary tensor parallelism."""

    ours: bool = True
    """Whether it is this package's own."""

    backend: str | None = None
    """The elementwise kernels: None takes those that a user gets, "eager" those that the host's CPU
    backend gets, which turns the compiler off."""

    missing: Callable[[torch.device], str | None] = lambda device: None
    """Says why it cannot run on a device here; None where it can."""


def bare_products(inputs: Inputs) -> None:
    """Logits = H W^T, dH = dz W and dW = sum of dz^T H over chunks, with nothing in between.

    The least that yields both gradients: every buffer is taken once, not per chunk, and dW is
    summed inside the product.
    """
    hidden, weight = inputs.hidden.detach().squeeze(1), inputs.weight.detach()
    logits = hidden.new_empty(min(inputs.chunk_tokens, len(hidden)), len(weight))
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    for i in range(0, len(hidden), inputs.chunk_tokens):
        h = hidden[i : i + inputs.chunk_tokens]
        z = logits[: len(h)]
        torch.mm(h, weight.T, out=z)
        torch.mm(z, weight, out=d_hidden[i : i + inputs.chunk_tokens])
        d_weight.addmm_(z.T, h, beta=float(i > 0))


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over ranks: what a column-parallel layer's input needs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        upstream = upstream.contiguous()
        dist.all_reduce(upstream, group=ctx.group)
        return upstream, None


def logits_of(inputs: Inputs):  # [s, 1, vp]
    hidden = inputs.hidden
    if inputs.group is not None:
        hidden = _SumGradient.apply(hidden, inputs.group)
    return torch.nn.functional.linear(hidden, inputs.weight)


def teacher_logits_of(inputs: Inputs):  # [s, 1, vp]
    return torch.nn.functional.linear(inputs.teacher_hidden, inputs.teacher_weight)


def dense(inputs):
    return dense_kd_loss(logits_of(inputs), inputs.target, tp_group=inputs.group).mean()


def sparse_chunked(inputs):
    return sparse_chunked_kd_loss(
        logits_of(inputs),
        inputs.target,
        chunk_size=inputs.chunk_tokens,
        reuse_logits=True,
        tp_group=inputs.group,
    ).mean()


def fused(gradient: str):
    def mean_loss(inputs):
        return fused_chunked_kd_loss(
            inputs.hidden,
            inputs.weight,
            inputs.target,
            chunk_size="auto" if gradient == "auto" else inputs.chunk_tokens,
            gradient=gradient,
            token_weights=inputs.token_weights,
            tp_group=inputs.group,
        ).mean()

    return mean_loss


def fused_online(gradient: str):
    def mean_loss(inputs):
        return fused_online_kd_loss(
            inputs.hidden,
            inputs.weight,
            inputs.teacher_hidden,
            inputs.teacher_weight,
            chunk_size=inputs.chunk_tokens,
            gradient=gradient,
            token_weights=inputs.token_weights,
            tp_group=inputs.group,
        ).mean()

    return mean_loss


def dense_online(inputs):
    return dense_online_kd_loss(
        logits_of(inputs), teacher_logits_of(inputs), tp_group=inputs.group
    ).mean()


def labels_fused(inputs):
    return fused_cross_entropy(
        inputs.hidden,
        inputs.weight,
        inputs.labels,
        chunk_size=inputs.chunk_tokens,
        gradient="in_forward",
        token_weights=inputs.token_weights,
        tp_group=inputs.group,
    ).mean()


def modelopt_logits_kl(inputs):
    return peers.modelopt_logits_kl(logits_of(inputs), teacher_logits_of(inputs), inputs.group)


def megatron_lm_cached(inputs):
    return peers.megatron_lm_cached(logits_of(inputs), inputs)


IMPLEMENTATIONS: dict[str, Implementation] = {
    BARE: Implementation("three bare products", "products", 3, bare_products),
    "dense": Implementation("dense", "topk", 3, dense, chunked=False),
    "sparse_chunked": Implementation("sparse_chunked", "topk", 3, sparse_chunked),
    "recompute": Implementation("fused_chunked, recompute", "topk", 4, fused("recompute")),
    "in_forward": Implementation("fused_chunked, in_forward", "topk", 3, fused("in_forward")),
    "recompute_eager": Implementation(
        "fused_chunked, recompute, eager", "topk", 4, fused("recompute"), backend="eager"
    ),
    "in_forward_eager": Implementation(
        "fused_chunked, in_forward, eager", "topk", 3, fused("in_forward"), backend="eager"
    ),
    "auto": Implementation("fused_chunked, all auto", "topk", 3, fused("auto"), chunked=False),
    "plain_kl_div": Implementation(
        "plain F.kl_div", "topk", 3, peers.plain_kl_div, chunked=False, shards=False, ours=False
    ),
    "paper_text": Implementation(
        "paper's fused loss (text, 4 products)", "topk", 4, paper.text, ours=False
    ),
    "paper_algorithm_1": Implementation(
        "paper's Algorithm 1 (5 products)", "topk", 5, paper.algorithm_1, ours=False
    ),
    "torch_linear_cross_entropy": Implementation(
        "F.linear_cross_entropy, dense targets",
        "topk",
        3,
        peers.torch_dense_targets,
        chunked=False,
        shards=False,
        ours=False,
        missing=peers.torch_missing,
    ),
    "megatron_lm_cached": Implementation(
        "Megatron-LM's cached-logits loss",
        "topk",
        3,
        megatron_lm_cached,
        chunked=False,
        shards=False,
        ours=False,
        missing=peers.megatron_lm_missing,
    ),
    "veomni_chunked_topk": Implementation(
        "VeOmni's chunked top-K loss",
        "topk",
        4,
        peers.veomni_chunked_topk,
        shards=False,
        ours=False,
        missing=peers.veomni_missing,
    ),
    "fused_online_recompute": Implementation(
        "fused_online, recompute", "online", 6, fused_online("recompute")
    ),
    "fused_online": Implementation(
        "fused_online, in_forward", "online", 4, fused_online("in_forward")
    ),
    "dense_online": Implementation("dense, online", "online", 4, dense_online, chunked=False),
    "modelopt_logits_kl": Implementation(
        "ModelOpt LogitsKLLoss",
        "online",
        4,
        modelopt_logits_kl,
        chunked=False,
        ours=False,
        missing=peers.modelopt_missing,
    ),
    "liger_fused_jsd": Implementation(
        "Liger fused JSD",
        "online",
        4,
        peers.liger_fused_jsd,
        chunked=False,
        shards=False,
        ours=False,
        missing=peers.liger_missing,
    ),
    "labels_fused": Implementation("fused cross-entropy, hard labels", "labels", 3, labels_fused),
    "torch_linear_cross_entropy_labels": Implementation(
        "F.linear_cross_entropy, chunked, hard labels",
        "labels",
        3,
        peers.torch_hard_labels,
        chunked=False,
        shards=False,
        ours=False,
        missing=peers.torch_missing,
    ),
}
# By quantity, the implementation that all others are compared with before they are timed.
REFERENCES = {"topk": "dense", "online": "dense_online", "labels": "labels_fused"}
