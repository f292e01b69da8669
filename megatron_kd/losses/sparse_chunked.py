"""Distillation loss from logits that are there already, without a second tensor of their size.

The forward pass copies a chunk of positions at a time, into one buffer; the backward pass forms the
gradient where it stays. With reuse_logits that is where the logits stood, so that the peak is the
logits once plus a chunk.

s sequence, b micro-batch, vp = v/tp this rank's vocabulary, k support.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_kd.losses.chunking import SPARSE_CHUNK
from megatron_kd.losses.dense import check_logits
from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.fused_loop import row_gap
from megatron_kd.losses.kernels import accumulation_dtype
from megatron_kd.losses.logit_transform import LogitTransform
from megatron_kd.losses.positions import LossOutputs, SavedReadings, loss_result
from megatron_kd.losses.target import LossResult, TopKTarget
from megatron_kd.losses.topk_loss import TopKLoss
from megatron_kd.losses.vocab_parallel import Reading, VocabShard


def sparse_chunked_kd_loss(
    logits: torch.Tensor,
    target: TopKTarget,
    *,
    chunk_size: int = SPARSE_CHUNK,
    reuse_logits: bool = False,
    divergence: Divergence = Divergence(),
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    return_metrics: bool = False,
) -> LossResult:
    """Per-token divergence from a truncated teacher, in nats, from logits, chunk by chunk.

    Args:
        logits: [s, b, vp], as for `dense_kd_loss`.
        target: The teacher's k tokens per position, see `TopKTarget`.
        chunk_size: Sequence positions per chunk. Transient memory is chunk_size * b * vp
            logits.
        reuse_logits: The backward pass writes the gradient into the logits' own memory. Only for
            logits that nobody reads afterwards; whoever does gets an error from autograd, or the
            gradient. The forward pass never changes them.
        The rest: as for `dense_kd_loss`.

    Returns:
        [s, b] fp32, unmasked, identical on all ranks of tp_group; with return_metrics also
        `KDMetrics`.

    Raises:
        ValueError: As for `dense_kd_loss`, or chunk_size is not positive.
    """
    shape, rows = check_logits(logits)
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive number of positions; got {chunk_size!r}")
    shard = VocabShard.of(rows, vocab_size, tp_group)
    transform = LogitTransform.of(logit_scale, logit_softcap)
    loss = TopKLoss.of(divergence, shard, target, labels, shape, transform=transform)
    outputs = _SparseLoss.apply(logits.flatten(0, 1), loss, chunk_size * shape[1], reuse_logits)
    return loss_result(outputs, shape, return_metrics)


class _SparseLoss(torch.autograd.Function):
    """`TopKLoss` on logits [s * b, vp], a chunk of rows at a time, in both passes."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, loss: TopKLoss, chunk_rows: int, reuse: bool
    ) -> tuple[torch.Tensor | None, ...]:
        dtype = accumulation_dtype(logits.dtype)
        positions, columns = loss.positions, loss.shard.unpadded_rows
        outputs = LossOutputs.zeros(
            positions, logits.new_empty(0, dtype=dtype), loss.divergence, loss.labels is not None
        )
        saved = SavedReadings(positions.rows)
        width = columns + row_gap(columns, logits.dtype, logits.device)
        buffer = logits.new_empty(min(chunk_rows, positions.rows), width)[:, :columns]
        for part in positions.chunks(chunk_rows):
            chunk, z = loss.open(part), buffer[: part.stop - part.start]
            reading = chunk.read_(z.copy_(logits[part, :columns]))
            outputs.put_(positions, part, *chunk.evaluate(reading))
            saved.put_(part, reading)
        ctx.save_for_backward(logits, *saved.tensors)
        ctx.loss, ctx.chunk_rows, ctx.reuse = loss, chunk_rows, reuse
        return outputs.leave(ctx)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, upstream: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, None, None, None]:
        logits, *saved = ctx.saved_tensors
        loss, columns = ctx.loss, ctx.loss.shard.unpadded_rows
        out = logits if ctx.reuse else torch.empty_like(logits)
        for part in loss.positions.chunks(ctx.chunk_rows):
            chunk, reading = loss.open(part), Reading(*(x[part] for x in saved))
            z = out[part, :columns]
            if not ctx.reuse:
                z.copy_(logits[part, :columns])
            chunk.cut_again_(z)
            chunk.differentiate_(z, reading, upstream[part])
            out[part, columns:] = 0
        return out, None, None, None
