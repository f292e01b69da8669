"""Distillation loss from logits that are there already, in one piece: the plain way.

    dz_v = dL/dlogR * exp(z_v - log R) off the support        dz_S = dL/dz_S on it

One fp32 copy of the logits is made and becomes the gradient (with retain_graph=True a copy of it
does). Where memory matters use `sparse_chunked_kd_loss`, which needs no such copy, or
`fused_chunked_kd_loss`, which needs no logits.

s sequence, b micro-batch, v vocabulary, vp = v/tp this rank's part of it, k support.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _get_current_graph_task_keep_graph as graph_is_kept
from torch.autograd.function import once_differentiable

from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.full_loss import ChunkLoss
from megatron_kd.losses.kernels import accumulation_dtype
from megatron_kd.losses.logit_transform import LogitTransform
from megatron_kd.losses.positions import LossOutputs, loss_result
from megatron_kd.losses.target import LossResult, TopKTarget
from megatron_kd.losses.topk_loss import TopKLoss
from megatron_kd.losses.vocab_parallel import VocabShard


def dense_kd_loss(
    logits: torch.Tensor,
    target: TopKTarget,
    *,
    divergence: Divergence = Divergence(),
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    return_metrics: bool = False,
) -> LossResult:
    """Per-token divergence from a truncated teacher to the student, in nats, from whole logits.

    Args:
        logits: [s, b, vp], fp32, bf16, fp16 or fp64. This rank's part of the vocabulary; never
            changed.
        target: The teacher's k tokens per position, see `TopKTarget`.
        divergence: Objective, tail, temperature, and the share of cross-entropy to the labels.
        labels: [s, b] integer global ids, or None. Negative labels are ignored (cross-entropy 0).
        vocab_size: Ids at or beyond it are padding columns: no mass, no gradient. None means no
            padding.
        tp_group: Ranks that share the vocabulary; None means the logits are whole.
        logit_softcap: c, where the logits given are x, and the model's own are z = c · tanh(scale ·
            x / c). None, also for logits that were capped already: no cap.
        logit_scale: scale; without a cap z = scale · x. 1, also for logits scaled already.
        return_metrics: Also return `KDMetrics`, detached.

    Returns:
        [s, b] fp32 (fp64 for fp64 logits), unmasked, identical on all ranks of tp_group (do not
        reduce again); with return_metrics a pair of it and `KDMetrics`.

    Raises:
        ValueError: Shapes or options disagree, or an id lies outside the vocabulary (on an
            accelerator, where looking would synchronise, such a position's loss and gradient are
            NaN instead).

    Source: arXiv 2608.03796, Eq. (2) and (3), for forward_kl with tail none.
    """
    shape, rows = check_logits(logits)
    shard = VocabShard.of(rows, vocab_size, tp_group)
    transform = LogitTransform.of(logit_scale, logit_softcap)
    loss = TopKLoss.of(divergence, shard, target, labels, shape, transform=transform)
    return loss_result(DenseLoss.apply(logits.flatten(0, 1), loss), shape, return_metrics)


def check_logits(logits: torch.Tensor) -> tuple[torch.Size, int]:
    """The leading shape [s, b] and the width, or a ValueError."""
    if logits.dim() != 3 or not logits.is_floating_point():
        raise ValueError(
            f"logits want a floating [s, b, v] tensor; got {logits.dtype} {list(logits.shape)}"
        )
    return logits.shape[:2], logits.shape[2]


class DenseLoss(torch.autograd.Function):
    """A loss (`topk_loss`, `full_loss`) on logits [s * b, vp], opened as one chunk of all rows."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, loss: ChunkLoss) -> tuple[torch.Tensor | None, ...]:
        every = slice(0, loss.positions.rows)
        dtype = accumulation_dtype(logits.dtype)
        z = logits[:, : loss.shard.unpadded_rows].to(dtype, copy=True)
        chunk = loss.open(every)
        reading = chunk.read_(z, then_differentiate=ctx.needs_input_grad[0])
        outputs = LossOutputs.zeros(
            loss.positions, reading[0], loss.divergence, loss.labels is not None
        )
        outputs.put_(loss.positions, every, *chunk.evaluate(reading))
        ctx.save_for_backward(z, *reading)
        ctx.chunk, ctx.reading = chunk, loss.Reading
        ctx.dtype, ctx.width = logits.dtype, logits.shape[-1]
        return outputs.leave(ctx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        z, *reading = ctx.saved_tensors
        if graph_is_kept():
            z = z.clone()  # the next backward pass wants these logits too
        ctx.chunk.differentiate_(z, ctx.reading(*reading), upstream)
        if z.shape[-1] < ctx.width:
            z = torch.nn.functional.pad(z, (0, ctx.width - z.shape[-1]))
        return z.to(ctx.dtype), None
