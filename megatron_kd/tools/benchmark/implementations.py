"""What can be measured: the bare products, this package's losses, and their alternatives.

Each takes `Inputs` and returns the mean loss in nats with its graph; implementations of one
quantity return the same number and the same gradients. `products` counts the [S, D] x [D, V] matrix
products of one forward and backward pass, the teacher's included.

Letters: S sequence, D hidden, Vp this rank's vocabulary, K support.
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


@dataclass(frozen=True, kw_only=True)
class Implementation:
    title: str
    quantity: str
    """products (nothing but those), topk, online or labels: what is computed, and so compared."""
    products: int
    mean_loss: Callable[[Inputs], torch.Tensor | None]
    chunked: bool = True
    """Whether it takes a chunk size."""
    shards: bool = True
    """Whether it runs under vocabulary tensor parallelism."""
    missing: Callable[[torch.device], str | None] = lambda device: None
    """Why it cannot run on a device here, or None."""
    ours: bool = True
    backend: str | None = None
    """Of the elementwise work. None: what a user gets; eager: what the host's CPU backend gets,
    which turns the compiler off."""


def bare_products(inputs: Inputs) -> None:
    """logits = H W^T, dH = dz W and dW = sum of dz^T H over chunks, with nothing in between.

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


def logits_of(inputs: Inputs):  # [S, 1, Vp]
    hidden = inputs.hidden
    if inputs.group is not None:
        hidden = _SumGradient.apply(hidden, inputs.group)
    return torch.nn.functional.linear(hidden, inputs.weight)


def teacher_logits_of(inputs: Inputs):  # [S, 1, Vp]
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


def _implementations() -> dict[str, Implementation]:
    make = Implementation
    return {
        BARE: make(
            title="three bare products", quantity="products", products=3, mean_loss=bare_products
        ),
        "dense": make(title="dense", quantity="topk", products=3, mean_loss=dense, chunked=False),
        "sparse_chunked": make(
            title="sparse_chunked", quantity="topk", products=3, mean_loss=sparse_chunked
        ),
        "recompute": make(
            title="fused_chunked, recompute",
            quantity="topk",
            products=4,
            mean_loss=fused("recompute"),
        ),
        "in_forward": make(
            title="fused_chunked, in_forward",
            quantity="topk",
            products=3,
            mean_loss=fused("in_forward"),
        ),
        "recompute_eager": make(
            title="fused_chunked, recompute, eager",
            quantity="topk",
            products=4,
            mean_loss=fused("recompute"),
            backend="eager",
        ),
        "in_forward_eager": make(
            title="fused_chunked, in_forward, eager",
            quantity="topk",
            products=3,
            mean_loss=fused("in_forward"),
            backend="eager",
        ),
        "auto": make(
            title="fused_chunked, all auto",
            quantity="topk",
            products=3,
            mean_loss=fused("auto"),
            chunked=False,
        ),
        "plain_kl_div": make(
            title="plain F.kl_div",
            quantity="topk",
            products=3,
            mean_loss=peers.plain_kl_div,
            chunked=False,
            shards=False,
            ours=False,
        ),
        "paper_text": make(
            title="paper's fused loss (text, 4 products)",
            quantity="topk",
            products=4,
            mean_loss=paper.text,
            ours=False,
        ),
        "paper_algorithm_1": make(
            title="paper's Algorithm 1 (5 products)",
            quantity="topk",
            products=5,
            mean_loss=paper.algorithm_1,
            ours=False,
        ),
        "torch_linear_cross_entropy": make(
            title="F.linear_cross_entropy, dense targets",
            quantity="topk",
            products=3,
            mean_loss=peers.torch_dense_targets,
            chunked=False,
            shards=False,
            missing=peers.torch_missing,
            ours=False,
        ),
        "fused_online_recompute": make(
            title="fused_online, recompute",
            quantity="online",
            products=6,
            mean_loss=fused_online("recompute"),
        ),
        "fused_online": make(
            title="fused_online, in_forward",
            quantity="online",
            products=4,
            mean_loss=fused_online("in_forward"),
        ),
        "dense_online": make(
            title="dense, online",
            quantity="online",
            products=4,
            mean_loss=dense_online,
            chunked=False,
        ),
        "modelopt_logits_kl": make(
            title="ModelOpt LogitsKLLoss",
            quantity="online",
            products=4,
            mean_loss=lambda inputs: peers.modelopt_logits_kl(
                logits_of(inputs), teacher_logits_of(inputs), inputs.group
            ),
            chunked=False,
            missing=peers.modelopt_missing,
            ours=False,
        ),
        "liger_fused_jsd": make(
            title="Liger fused JSD",
            quantity="online",
            products=4,
            mean_loss=peers.liger_fused_jsd,
            chunked=False,
            shards=False,
            missing=peers.liger_missing,
            ours=False,
        ),
        "labels_fused": make(
            title="fused cross-entropy, hard labels",
            quantity="labels",
            products=3,
            mean_loss=labels_fused,
        ),
        "torch_linear_cross_entropy_labels": make(
            title="F.linear_cross_entropy, chunked, hard labels",
            quantity="labels",
            products=3,
            mean_loss=peers.torch_hard_labels,
            chunked=False,
            shards=False,
            missing=peers.torch_missing,
            ours=False,
        ),
    }


IMPLEMENTATIONS = _implementations()
# What the others of their quantity are compared with before they are timed.
REFERENCES = {"topk": "dense", "online": "dense_online", "labels": "labels_fused"}
