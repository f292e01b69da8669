"""Distillation loss from hidden states and the output weight; the [S, B, V] logits never exist.

Per chunk of positions: project, read z_S and log R, and either keep only those (recompute) or turn the chunk's logits into
their gradient while they are at hand (in_forward).

    gradient     products                          upstream gradient
    recompute    1 forward + (1 + 2) backward = 4  any
    in_forward   (1 + 2) forward = 3, backward     one scalar times token_weights (anything else: NaN)
                 only scales

Letters: S sequence, B micro-batch, N = S * B positions, D hidden, Vp this rank's vocabulary, K support, n rows of a chunk.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_kd.losses.chunking import chunk_rows
from megatron_kd.losses.elementwise import accumulation_dtype
from megatron_kd.losses.target import Divergence, TopKTarget
from megatron_kd.losses.topk_loss import SavedReadings, TopKLoss, finish
from megatron_kd.losses.vocab_parallel import (
    VocabShard,
    cut_,
    gather_sequence,
    read_,
    reduce_scatter_sequence,
    write_gradient_,
)
from megatron_kd.losses.weight_gradient import WeightGradient

GRADIENT_MODES = ("recompute", "in_forward", "auto")
# Relative departure of the upstream gradient from scalar * token_weights that is still rounding.
UPSTREAM_TOLERANCE = 1e-4


def fused_chunked_kd_loss(
    hidden_states,
    output_weight,
    target: TopKTarget,
    *,
    bias=None,
    chunk_size="auto",
    gradient="recompute",
    token_weights=None,
    supervised_index=None,
    sequence_parallel=False,
    gradient_accumulation_fusion=False,
    memory_budget_bytes=None,
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
    """Per-token divergence from a truncated teacher to the student, in nats, from hidden states.

    Args:
        hidden_states: [S, B, D], bf16, fp16, fp32 or fp64; with sequence_parallel this rank's [S/tp, B, D].
        output_weight: [Vp, D], this rank's rows of the output layer, dtype of hidden_states (under autocast both
            are cast to its dtype).
        target: The teacher's K tokens per position of the whole [S, B], see `TopKTarget`.
        bias: [Vp] or None.
        chunk_size: Sequence positions per chunk, or "auto": from memory_budget_bytes (bytes of a chunk's logits;
            None for a default) and the shapes. Transient memory is about chunk_size * B * Vp * 4 bytes.
        gradient: recompute, in_forward (needs token_weights) or auto: in_forward where a gradient is wanted,
            token_weights are given and the dtype is not fp16; recompute otherwise.
        token_weights: [S, B] or None. The per-token factors of the sum that is differentiated, up to one scalar
            (usually the loss mask). In in_forward mode an upstream gradient that is no multiple of them makes the
            gradients NaN. The returned loss is not multiplied by them.
        supervised_index: int64 [n] or None: rows of the flattened [S * B] positions to project. All others get loss 0
            and no gradient, and cost nothing. Distinct, on the device of hidden_states, equal on all ranks of
            tp_group. May be empty.
        sequence_parallel: hidden_states are sharded over tp_group along S; they are gathered here and their
            gradient is reduce-scattered.
        gradient_accumulation_fusion: Add the weight's gradient to output_weight.main_grad (or get_main_grad()) as
            Megatron's fused layers do, set grad_added_to_main_grad and return a dummy.
        The rest: as for `dense_kd_loss`.

    Returns:
        [S, B] fp32, nats, unmasked, identical on all ranks of tp_group (do not reduce again); with return_metrics a
        pair of it and `KDMetrics`.

    Raises:
        ValueError: Shapes, dtypes or options disagree; in_forward without token_weights or in fp16 (its loss
            scaling would overflow what is stored unscaled); an id outside the vocabulary.

    Source: arXiv 2608.03796, Eq. (2) and (3), for forward_kl with tail none.
    """
    options = Divergence(
        objective=objective,
        tail=tail,
        temperature=temperature,
        temperature_squared=temperature_squared,
        beta=beta,
        ce_weight=ce_weight,
    )
    shape = check_hidden(hidden_states, output_weight, bias, sequence_parallel, tp_group)
    loss = TopKLoss.of(options, target, labels, shape, supervised_index)
    shard = VocabShard.of(output_weight.shape[0], vocab_size, tp_group)
    loss.check_ids(shard)
    dtype = compute_dtype(hidden_states, output_weight)
    wanted = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden_states, output_weight, bias)
    )
    plan = FusedPlan(
        loss=loss,
        shard=shard,
        chunk_rows=chunk_rows(
            chunk_size,
            rows=loss.rows.count,
            batch=shape[1],
            width=shard.valid,
            dtype=dtype,
            device=hidden_states.device,
            budget_bytes=memory_budget_bytes,
        ),
        dtype=dtype,
        in_forward=gradient_mode(gradient, token_weights, dtype, shape) == "in_forward" and wanted,
        sequence_parallel=sequence_parallel and shard.group is not None,
        fuse=gradient_accumulation_fusion,
    )
    weights = token_weights.detach().flatten() if plan.in_forward else None
    with torch.autocast(hidden_states.device.type, enabled=False):
        outputs = _FusedLoss.apply(hidden_states, output_weight, bias, plan, weights)
    return finish(outputs, shape, return_metrics)


def check_hidden(hidden_states, output_weight, bias, sequence_parallel, tp_group):
    """The full leading shape [S, B], or a ValueError."""
    if hidden_states.dim() != 3 or output_weight.dim() != 2:
        raise ValueError(
            "fused losses want hidden_states [S, B, D] and output_weight [V/tp, D]; got "
            f"{list(hidden_states.shape)} and {list(output_weight.shape)}"
        )
    if hidden_states.shape[2] != output_weight.shape[1]:
        raise ValueError(
            f"hidden_states have {hidden_states.shape[2]} features, output_weight takes "
            f"{output_weight.shape[1]}: they belong to different layers"
        )
    if bias is not None and bias.shape != output_weight.shape[:1]:
        raise ValueError(f"bias wants [{output_weight.shape[0]}], got {list(bias.shape)}")
    if sequence_parallel and tp_group is None:
        raise ValueError("sequence_parallel needs the tp_group over which the sequence is sharded")
    ranks = dist.get_world_size(tp_group) if sequence_parallel else 1
    return hidden_states.shape[0] * ranks, hidden_states.shape[1]


def compute_dtype(hidden_states, output_weight):
    """The dtype of the products: autocast's where it is on, otherwise the one both share."""
    kind = hidden_states.device.type
    if torch.is_autocast_enabled(kind) and hidden_states.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    if hidden_states.dtype != output_weight.dtype:
        raise ValueError(
            f"hidden_states are {hidden_states.dtype}, output_weight is {output_weight.dtype}: cast one, or run "
            "under torch.autocast"
        )
    return hidden_states.dtype


def gradient_mode(gradient, token_weights, dtype, shape) -> str:
    if gradient not in GRADIENT_MODES:
        raise ValueError(f"gradient must be one of {', '.join(GRADIENT_MODES)}; got {gradient!r}")
    if token_weights is not None and tuple(token_weights.shape) != tuple(shape):
        raise ValueError(
            f"token_weights want [S, B] = {list(shape)}, got {list(token_weights.shape)}"
        )
    if gradient == "auto":
        usable = token_weights is not None and dtype != torch.float16
        return "in_forward" if usable else "recompute"
    if gradient == "in_forward" and token_weights is None:
        raise ValueError(
            "gradient in_forward needs token_weights [S, B] (the loss mask) in the forward pass; without "
            "them use gradient recompute"
        )
    if gradient == "in_forward" and dtype == torch.float16:
        raise ValueError(
            "gradient in_forward stores gradients before fp16 loss scaling, where they underflow: use bf16, "
            "or gradient recompute"
        )
    return gradient


@dataclass(frozen=True)
class FusedPlan:
    loss: TopKLoss
    shard: VocabShard
    chunk_rows: int
    dtype: torch.dtype
    in_forward: bool
    sequence_parallel: bool
    fuse: bool


class Gradients:
    """dH, dW and d_bias as the chunks come in; what autograd does not ask for is not formed."""

    def __init__(self, ctx, hidden, weight, bias, plan: FusedPlan, needs, into_main_grad: bool):
        self.plan, self.hidden_dtype = plan, hidden.dtype
        self.needs_hidden, self.needs_weight, self.needs_bias = needs
        shape = (plan.loss.rows.positions, hidden.shape[-1])
        self.hidden = self.weight = self.bias = None
        if self.needs_hidden:
            make = torch.empty if plan.loss.rows.index is None else torch.zeros
            self.hidden = make(shape, dtype=plan.dtype, device=hidden.device)  # [N, D]
        if self.needs_weight:
            self.weight = WeightGradient(
                weight, plan.shard.valid, fuse=plan.fuse, into_main_grad=into_main_grad
            )
        if self.needs_bias:
            self.bias = torch.zeros_like(bias, dtype=accumulation_dtype(bias.dtype))
            self.bias_dtype = bias.dtype

    def add_(self, chunk, dz, h, w) -> None:
        """dz [n, valid], h [n, D], w [valid, D]"""
        rows = self.plan.loss.rows
        if self.needs_hidden:
            if rows.index is None:
                torch.mm(dz, w, out=self.hidden[chunk])
            else:
                rows.put_(self.hidden, chunk, dz @ w)
        if self.needs_weight:
            self.weight.add_(dz, h)
        if self.needs_bias:
            self.bias[: dz.shape[1]] += dz.sum(0, dtype=self.bias.dtype)

    def reduced_hidden(self, shape):
        """dH summed over the shards of the vocabulary, [S, B, D] or this rank's part of it."""
        if not self.needs_hidden:
            return None
        group = self.plan.shard.group
        if self.plan.sequence_parallel:
            full = self.hidden.view(-1, *shape[1:])
            return reduce_scatter_sequence(full, group)
        if group is not None:
            dist.all_reduce(self.hidden, group=group)
        return self.hidden.view(shape)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, plan: FusedPlan, token_weights):
        loss, shard = plan.loss, plan.shard
        h_all, w, b = _operands(hidden, weight, bias, plan)
        like = hidden.new_empty(0, dtype=accumulation_dtype(plan.dtype))
        outputs = loss.outputs(like)
        needs = ctx.needs_input_grad[:3]
        gradients = saved = None
        if plan.in_forward:
            gradients = Gradients(ctx, hidden, weight, bias, plan, needs, into_main_grad=False)
        elif any(needs):
            saved = SavedReadings.empty(loss, like)
        buffer = _logits_buffer(hidden, plan)
        for chunk in loss.rows.chunks(plan.chunk_rows):
            h = loss.rows.take(h_all, chunk).to(plan.dtype)
            z = _project(h, w, b, buffer)
            columns = loss.columns(chunk, shard)
            reading = read_(z, columns, loss.inverse_taus, shard)
            if gradients is None:
                values = loss.evaluate(reading.gathered, reading.log_r, chunk)
            else:
                upstream = loss.rows.take(token_weights, chunk)
                *values, pulled = loss.differentiate(
                    reading.gathered, reading.log_r, chunk, upstream
                )
                write_gradient_(z, reading, columns, *pulled, loss.inverse_taus)
                gradients.add_(chunk, z, h, w)
            outputs.put_(loss.rows, chunk, *values)
            if saved is not None:
                saved.put_(chunk, reading)
        ctx.plan, ctx.shape = plan, hidden.shape
        if gradients is not None:
            ctx.gradients = gradients
            d_hidden = gradients.reduced_hidden(hidden.shape)
            total = gradients.weight.total if gradients.needs_weight else None
            gradients.hidden = None
            ctx.save_for_backward(token_weights, d_hidden, total, gradients.bias)
        elif saved is not None:
            ctx.weight, ctx.bias = weight, bias
            ctx.save_for_backward(hidden, weight, bias, *saved.tensors())
        ctx.mark_non_differentiable(*(x for x in outputs.tensors()[1:] if x is not None))
        return outputs.tensors()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream, *_):
        with torch.autocast(upstream.device.type, enabled=False):
            if ctx.plan.in_forward:
                return _scale(ctx, upstream)
            return _recompute(ctx, upstream)


def _operands(hidden, weight, bias, plan):
    """[N, D] whole sequence, [valid, D] rows that are no padding, [valid] bias."""
    full = gather_sequence(hidden, plan.shard.group) if plan.sequence_parallel else hidden
    valid = plan.shard.valid
    b = None if bias is None else bias[:valid].to(plan.dtype)
    return full.flatten(0, 1), weight[:valid].to(plan.dtype), b


def _logits_buffer(hidden, plan):
    rows = min(plan.chunk_rows, plan.loss.rows.count)
    return hidden.new_empty(rows, plan.shard.valid, dtype=plan.dtype)


def _project(h, w, b, buffer):
    out = buffer[: h.shape[0]]
    return torch.mm(h, w.T, out=out) if b is None else torch.addmm(b, h, w.T, out=out)


def _recompute(ctx, upstream):
    plan, loss, shard = ctx.plan, ctx.plan.loss, ctx.plan.shard
    hidden, weight, bias, *saved = ctx.saved_tensors
    saved = SavedReadings(*saved)
    h_all, w, b = _operands(hidden, weight, bias, plan)
    needs = ctx.needs_input_grad[:3]
    gradients = Gradients(ctx, hidden, ctx.weight, bias, plan, needs, into_main_grad=True)
    buffer = _logits_buffer(hidden, plan)
    for chunk in loss.rows.chunks(plan.chunk_rows):
        h = loss.rows.take(h_all, chunk).to(plan.dtype)
        z = _project(h, w, b, buffer)
        columns, reading = loss.columns(chunk, shard), saved.take(chunk)
        pulled = loss.differentiate(
            reading.gathered, reading.log_r, chunk, loss.rows.take(upstream, chunk)
        )[-1]
        if shard.valid:
            cut_(z, columns)
        write_gradient_(z, reading, columns, *pulled, loss.inverse_taus)
        gradients.add_(chunk, z, h, w)
    d_hidden = gradients.reduced_hidden(ctx.shape)
    if d_hidden is not None:
        d_hidden = d_hidden.to(hidden.dtype)
    d_weight = gradients.weight.finish() if gradients.needs_weight else None
    d_bias = gradients.bias.to(bias.dtype) if gradients.needs_bias else None
    return d_hidden, d_weight, d_bias, None, None


def _scale(ctx, upstream):
    """Bring in the scalar. The stored gradients are scaled in place: a second backward pass raises."""
    token_weights, d_hidden, total, d_bias = ctx.saved_tensors
    gradients = ctx.gradients
    scale = upstream_scale(upstream, token_weights)
    d_weight = None
    if d_hidden is not None:
        d_hidden = d_hidden.mul_(scale).to(gradients.hidden_dtype)
    if total is not None:
        d_weight = gradients.weight.finish(scale)
    if d_bias is not None:
        d_bias = d_bias.mul_(scale).to(gradients.bias_dtype)
    return d_hidden, d_weight, d_bias, None, None


def upstream_scale(upstream, token_weights):
    """The scalar s with upstream = s * token_weights, NaN where there is none; 0 where both are zero. No sync."""
    weights = token_weights.to(upstream.dtype)
    if weights.numel() == 0:
        return upstream.new_zeros(())
    largest = weights.abs().argmax().unsqueeze(0)
    pivot = weights.gather(0, largest).squeeze(0)
    scale = torch.where(pivot == 0, 0.0, upstream.gather(0, largest).squeeze(0) / pivot)
    departure = (upstream - scale * weights).abs().amax()
    fits = departure <= UPSTREAM_TOLERANCE * (scale * pivot).abs()
    return torch.where(fits, scale, float("nan"))
