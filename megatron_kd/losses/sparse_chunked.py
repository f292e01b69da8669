"""Distillation loss from logits that are there already, without a second tensor of their size.

Both passes take a chunk of positions at a time and copy only that. With reuse_logits the gradient is written where the
logits stood, so that the peak is the logits once plus a chunk.

Letters: S sequence, B micro-batch, N = S * B positions, Vp this rank's vocabulary, K support, C chunk.
"""

import torch
from torch.autograd.function import once_differentiable

from megatron_kd.losses.dense import check_logits
from megatron_kd.losses.elementwise import accumulation_dtype
from megatron_kd.losses.target import Divergence, TopKTarget
from megatron_kd.losses.topk_loss import SavedReadings, TopKLoss, finish
from megatron_kd.losses.vocab_parallel import VocabShard, cut_, read_, write_gradient_


def sparse_chunked_kd_loss(
    logits,
    target: TopKTarget,
    *,
    chunk_size=1024,
    reuse_logits=False,
    objective="forward_kl",
    tail="none",
    temperature=1.0,
    temperature_squared=False,
    beta=0.5,
    labels=None,
    ce_weight=0.0,
    vocab_size=None,
    tp_group=None,
    return_metrics=False,
):
    """Per-token divergence from a truncated teacher to the student, in nats, from logits, chunk by chunk.

    Args:
        logits: [S, B, Vp], as for `dense_kd_loss`.
        target: The teacher's K tokens per position, see `TopKTarget`.
        chunk_size: Sequence positions per chunk. Transient memory is about chunk_size * B * Vp * 4 bytes.
        reuse_logits: The backward pass writes the gradient into the logits' own memory. Only for logits that
            nobody reads afterwards; whoever does gets an error from autograd, or the gradient. The forward pass
            never changes them.
        The rest: as for `dense_kd_loss`.

    Returns:
        [S, B] fp32, unmasked, identical on all ranks of tp_group; with return_metrics also `KDMetrics`.

    Raises:
        ValueError: As for `dense_kd_loss`, or chunk_size is not positive.
    """
    options = Divergence(
        objective=objective,
        tail=tail,
        temperature=temperature,
        temperature_squared=temperature_squared,
        beta=beta,
        ce_weight=ce_weight,
    )
    shape, rows = check_logits(logits)
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive number of positions; got {chunk_size!r}")
    loss = TopKLoss.of(options, target, labels, shape)
    shard = VocabShard.of(rows, vocab_size, tp_group)
    loss.check_ids(shard)
    chunk_rows = chunk_size * shape[1]
    outputs = _SparseLoss.apply(logits.flatten(0, 1), loss, shard, chunk_rows, reuse_logits)
    return finish(outputs, shape, return_metrics)


class _SparseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, loss: TopKLoss, shard: VocabShard, chunk_rows: int, reuse: bool):
        dtype = accumulation_dtype(logits.dtype)
        like = logits.new_empty(0, dtype=dtype)
        outputs, saved = loss.outputs(like), SavedReadings.empty(loss, like)
        for chunk in loss.rows.chunks(chunk_rows):
            z = logits[chunk, : shard.valid].to(dtype, copy=True)
            reading = read_(z, loss.columns(chunk, shard), loss.inverse_taus, shard)
            saved.put_(chunk, reading)
            outputs.put_(loss.rows, chunk, *loss.evaluate(reading.gathered, reading.log_r, chunk))
        ctx.save_for_backward(logits, *saved.tensors())
        ctx.loss, ctx.shard, ctx.chunk_rows, ctx.reuse = loss, shard, chunk_rows, reuse
        ctx.mark_non_differentiable(*(x for x in outputs.tensors()[1:] if x is not None))
        return outputs.tensors()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        logits, *saved = ctx.saved_tensors
        saved, loss, shard = SavedReadings(*saved), ctx.loss, ctx.shard
        out = logits if ctx.reuse else torch.empty_like(logits)
        for chunk in loss.rows.chunks(ctx.chunk_rows):
            columns, reading = loss.columns(chunk, shard), saved.take(chunk)
            _, _, gradients = loss.differentiate(
                reading.gathered, reading.log_r, chunk, upstream[chunk]
            )
            z = logits[chunk, : shard.valid].to(reading.m.dtype, copy=True)
            if shard.valid:
                cut_(z, columns)
            write_gradient_(z, reading, columns, *gradients, loss.inverse_taus)
            out[chunk, : shard.valid] = z
            out[chunk, shard.valid :] = 0
        return out, None, None, None, None
