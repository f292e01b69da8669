"""The loop over chunks that every fused loss shares: project, read, and turn logits into gradients.

    gradient     products                                    upstream gradient
    recompute    1 forward + (1 + 2) backward = 4            any
    in_forward   (1 + 2) forward = 3, backward only scales   one scalar times token_weights
                                                             (anything else: NaN)

What happens to a chunk's logits is the loss's business (`topk_loss`, `full_loss`): it offers
open(chunk) -> .read_(z), .resume_(z), .evaluate(reading), .differentiate_(z, reading, upstream).

Letters: S sequence, B micro-batch, N = S * B positions, D hidden, Vp this rank's vocabulary, n
rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_kd.losses.chunking import ChunkSize, chunk_rows
from megatron_kd.losses.elementwise import accumulation_dtype
from megatron_kd.losses.full_loss import ChunkLoss
from megatron_kd.losses.rows import Outputs, Rows, Saved
from megatron_kd.losses.vocab_parallel import (
    VocabShard,
    gather_sequence,
    reduce_scatter_sequence,
)
from megatron_kd.losses.weight_gradient import WeightGradient

GradientMode: TypeAlias = Literal["recompute", "in_forward", "auto"]
GRADIENT_MODES = get_args(GradientMode)
# Relative departure of the upstream gradient from scalar * token_weights that is still rounding.
UPSTREAM_TOLERANCE = 1e-4
ALIASING_BYTES, ROW_GAP_BYTES = 4096, 256


@dataclass(frozen=True)
class FusedPlan:
    loss: ChunkLoss
    chunk_rows: int
    dtype: torch.dtype
    in_forward: bool
    sequence_parallel: bool
    fuse: bool


def fused_loss(
    hidden_states: torch.Tensor,
    output_weight: torch.Tensor,
    bias: torch.Tensor | None,
    loss: ChunkLoss,
    *,
    batch: int,
    chunk_size: ChunkSize,
    gradient: GradientMode,
    token_weights: torch.Tensor | None,
    sequence_parallel: bool,
    gradient_accumulation_fusion: bool,
    memory_budget_bytes: int | None,
) -> tuple[torch.Tensor | None, ...]:
    """Flat outputs [N] of a loss over the chunks of hidden_states."""
    dtype = compute_dtype(hidden_states, output_weight)
    wanted = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden_states, output_weight, bias)
    )
    positions = loss.rows.positions
    mode = gradient_mode(gradient, token_weights, dtype, (positions // batch, batch))
    plan = FusedPlan(
        loss=loss,
        chunk_rows=chunk_rows(
            chunk_size,
            rows=loss.rows.count,
            batch=batch,
            width=loss.shard.valid * loss.tensors_per_chunk,
            dtype=dtype,
            device=hidden_states.device,
            budget_bytes=memory_budget_bytes,
        ),
        dtype=dtype,
        in_forward=mode == "in_forward" and wanted,
        sequence_parallel=sequence_parallel and loss.shard.group is not None,
        fuse=gradient_accumulation_fusion,
    )
    weights = token_weights.detach().flatten() if plan.in_forward else None
    with torch.autocast(hidden_states.device.type, enabled=False):
        return _FusedLoss.apply(hidden_states, output_weight, bias, plan, weights)


def check_hidden(
    hidden_states: torch.Tensor,
    output_weight: torch.Tensor,
    bias: torch.Tensor | None,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
) -> tuple[int, int]:
    """The leading shape [S, B] of the whole sequence, or a ValueError."""
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


def compute_dtype(hidden_states: torch.Tensor, output_weight: torch.Tensor) -> torch.dtype:
    """The dtype of the products: autocast's where it is on, otherwise the one both share."""
    kind = hidden_states.device.type
    if torch.is_autocast_enabled(kind) and hidden_states.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    if hidden_states.dtype != output_weight.dtype:
        raise ValueError(
            f"hidden_states are {hidden_states.dtype}, output_weight is {output_weight.dtype}: "
            "cast one, or run under torch.autocast"
        )
    return hidden_states.dtype


def gradient_mode(
    gradient: GradientMode,
    token_weights: torch.Tensor | None,
    dtype: torch.dtype,
    shape: Sequence[int],
) -> str:
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
            "gradient in_forward needs token_weights [S, B] (the loss mask) in the forward pass; "
            "without them use gradient recompute"
        )
    if gradient == "in_forward" and dtype == torch.float16:
        raise ValueError(
            "gradient in_forward stores gradients before fp16 loss scaling, where they underflow: "
            "use bf16, or gradient recompute"
        )
    return gradient


class Gradients:
    """dH, dW and d_bias as the chunks come in; what autograd does not ask for is not formed."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plan: FusedPlan,
        needs: tuple[bool, ...],
        into_main_grad: bool,
    ) -> None:
        self.plan, self.hidden_dtype = plan, hidden.dtype
        rows, shard = plan.loss.rows, plan.loss.shard
        self.hidden = self.weight = self.bias = self.bias_dtype = None
        if needs[0]:
            make = torch.empty if rows.index is None else torch.zeros
            shape = (rows.positions, hidden.shape[-1])
            self.hidden = make(shape, dtype=plan.dtype, device=hidden.device)  # [N, D]
        if needs[1]:
            self.weight = WeightGradient(
                weight, shard.valid, fuse=plan.fuse, into_main_grad=into_main_grad
            )
        if needs[2]:
            self.bias = torch.zeros_like(bias, dtype=accumulation_dtype(bias.dtype))
            self.bias_dtype = bias.dtype

    def add_(self, part: slice, dz: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> None:
        """dz [n, valid], h [n, D], w [valid, D]"""
        rows = self.plan.loss.rows
        if self.hidden is not None:
            if rows.index is None:
                torch.mm(dz, w, out=self.hidden[part])
            else:
                rows.put_(self.hidden, part, dz @ w)
        if self.weight is not None:
            self.weight.add_(dz, h)
        if self.bias is not None:
            self.bias[: dz.shape[1]] += dz.sum(0, dtype=self.bias.dtype)

    def stored(self, shape: torch.Size) -> "Stored":
        """All of them, dH [S, B, D] (or this rank's part) summed over the vocabulary's shards."""
        d_hidden, group = self.hidden, self.plan.loss.shard.group
        if d_hidden is not None and self.plan.sequence_parallel:
            d_hidden = reduce_scatter_sequence(d_hidden.view(-1, *shape[1:]), group)
        elif d_hidden is not None and group is not None:
            dist.all_reduce(d_hidden, group=group)
        if d_hidden is not None:
            d_hidden = d_hidden.view(shape)
        return Stored(d_hidden, self.hidden_dtype, self.weight, self.bias, self.bias_dtype)


@dataclass
class Stored:
    hidden: torch.Tensor | None
    hidden_dtype: torch.dtype
    weight: WeightGradient | None
    bias: torch.Tensor | None
    bias_dtype: torch.dtype | None

    def scaled(self, scale: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """What autograd gets for hidden_states, output_weight and bias."""
        if scale is not None:
            for gradient in (self.hidden, self.bias):
                if gradient is not None:
                    gradient.mul_(scale)
        return (
            None if self.hidden is None else self.hidden.to(self.hidden_dtype),
            None if self.weight is None else self.weight.finish(scale),
            None if self.bias is None else self.bias.to(self.bias_dtype),
        )


class Projection:
    """hidden @ weight.T (+ bias) for one chunk at a time, into one buffer."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: Rows,
        shard: VocabShard,
        dtype: torch.dtype,
        most_rows: int,
    ) -> None:
        """hidden [N, D] whole sequence, weight [Vp, D], bias [Vp] or None."""
        self.hidden, self.rows, self.dtype = hidden, rows, dtype
        self.weight = weight[: shard.valid].to(dtype)  # [valid, D]
        self.bias = None if bias is None else bias[: shard.valid].to(dtype)
        width = shard.valid + row_gap(shard.valid, dtype, hidden.device)
        buffer = hidden.new_empty(min(most_rows, rows.count), width, dtype=dtype)
        self.buffer = buffer[:, : shard.valid]

    def __call__(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """h [n, D] and logits [n, valid]; the latter lie in the buffer."""
        h = self.rows.take(self.hidden, part).to(self.dtype)
        out = self.buffer[: h.shape[0]]
        if self.bias is None:
            return h, torch.mm(h, self.weight.T, out=out)
        return h, torch.addmm(self.bias, h, self.weight.T, out=out)


def row_gap(columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Unused elements after each row of a chunk's logits.

    Rows a multiple of the page size apart compete for the same few cache lines, and on CPUs that
    costs the products up to a quarter of their time. 16-bit products have kernels of their own.
    """
    collide = columns * dtype.itemsize % ALIASING_BYTES == 0
    wide = dtype in (torch.float32, torch.float64)
    return ROW_GAP_BYTES // dtype.itemsize if device.type == "cpu" and wide and collide else 0


def _projection(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: FusedPlan
) -> Projection:
    shard = plan.loss.shard
    full = gather_sequence(hidden, shard.group) if plan.sequence_parallel else hidden
    return Projection(
        full.flatten(0, 1), weight, bias, plan.loss.rows, shard, plan.dtype, plan.chunk_rows
    )


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        plan: FusedPlan,
        token_weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        loss, rows = plan.loss, plan.loss.rows
        like = hidden.new_empty(0, dtype=accumulation_dtype(plan.dtype))
        outputs = Outputs.blank(rows, like, loss.divergence, loss.labels is not None)
        needs = ctx.needs_input_grad[:3]
        gradients = saved = None
        if plan.in_forward:
            gradients = Gradients(hidden, weight, bias, plan, needs, into_main_grad=False)
        elif any(needs):
            saved = Saved(rows.count)
        project = _projection(hidden, weight, bias, plan)
        loss.start(plan.chunk_rows)
        for part in rows.chunks(plan.chunk_rows):
            h, z = project(part)
            chunk = loss.open(part)
            reading = chunk.read_(z, then_differentiate=gradients is not None)
            if gradients is None:
                values = chunk.evaluate(reading)
            else:
                upstream = rows.take(token_weights, part)
                values = chunk.differentiate_(z, reading, upstream)
                gradients.add_(part, z, h, project.weight)
            outputs.put_(rows, part, *values)
            if saved is not None:
                saved.put_(part, reading)
        loss.stop()
        ctx.plan = plan
        if gradients is not None:
            ctx.stored = gradients.stored(hidden.shape)
            ctx.save_for_backward(token_weights)
        elif saved is not None:
            ctx.weight = weight  # the parameter itself: main_grad is its attribute
            ctx.save_for_backward(hidden, weight, bias, *saved.tensors)
        return outputs.hand_over(ctx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(upstream.device.type, enabled=False):
            backward = _scale if ctx.plan.in_forward else _recompute
            return *backward(ctx, upstream), None, None


def _recompute(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    plan, loss, rows = ctx.plan, ctx.plan.loss, ctx.plan.loss.rows
    hidden, weight, bias, *saved = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    gradients = Gradients(hidden, ctx.weight, bias, plan, needs, into_main_grad=True)
    project = _projection(hidden, weight, bias, plan)
    loss.start(plan.chunk_rows)
    for part in rows.chunks(plan.chunk_rows):
        h, z = project(part)
        chunk, reading = loss.open(part), loss.Reading(*(x[part] for x in saved))
        chunk.resume_(z)
        chunk.differentiate_(z, reading, rows.take(upstream, part))
        gradients.add_(part, z, h, project.weight)
    loss.stop()
    return gradients.stored(hidden.shape).scaled(None)


def _scale(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Bring in the scalar, in place."""
    if ctx.stored is None:
        raise RuntimeError(
            "second backward pass through a loss of gradient in_forward, which gave its stored "
            "gradients away in the first: use gradient recompute"
        )
    stored, ctx.stored = ctx.stored, None  # or autograd would copy what it can keep
    (token_weights,) = ctx.saved_tensors
    return stored.scaled(upstream_scale(upstream, token_weights))


def upstream_scale(upstream: torch.Tensor, token_weights: torch.Tensor) -> torch.Tensor:
    """The s with upstream = s * token_weights: NaN where there is none, 0 where both are 0."""
    weights = token_weights.to(upstream.dtype)
    if weights.numel() == 0:
        return upstream.new_zeros(())
    largest = weights.abs().argmax().unsqueeze(0)
    pivot = weights.gather(0, largest).squeeze(0)
    scale = torch.where(pivot == 0, 0.0, upstream.gather(0, largest).squeeze(0) / pivot)
    departure = (upstream - scale * weights).abs().amax()
    fits = departure <= UPSTREAM_TOLERANCE * (scale * pivot).abs()
    return torch.where(fits, scale, float("nan"))
