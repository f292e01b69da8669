"""The loop over chunks that every fused loss shares: project, read, and turn logits into gradients.

    gradient     products                                    upstream gradient
    recompute    1 forward + (1 + 2) backward = 4            any
    in_forward   (1 + 2) forward = 3, backward only scales   one scalar times token_weights
                                                             (anything else: NaN)

What happens to a chunk's logits is the loss's business (`topk_loss`, `full_loss`): it offers
open(chunk) -> .read_(z), .cut_again_(z), .evaluate(reading), .differentiate_(z, reading, upstream).

s sequence, b micro-batch, h hidden, vp = v/tp this rank's vocabulary, n rows of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_kd.losses.chunking import ChunkSize, chunk_rows
from megatron_kd.losses.full_loss import ChunkLoss
from megatron_kd.losses.gradients import Gradients
from megatron_kd.losses.kernels import accumulation_dtype
from megatron_kd.losses.positions import LossOutputs, Positions, SavedReadings
from megatron_kd.losses.vocab_parallel import VocabShard, gather_sequence

GradientMode: TypeAlias = Literal["recompute", "in_forward", "auto"]
GRADIENT_MODES = get_args(GradientMode)
# Relative departure of the upstream gradient from scalar * token_weights that is still rounding.
UPSTREAM_TOLERANCE = 1e-4
ALIASING_BYTES, ROW_GAP_BYTES = 4096, 256
DEVICE_ROW_ELEMENTS = 64


@dataclass(frozen=True)
class FusedPlan:
    """How one fused loss is computed, decided before its forward pass."""

    loss: ChunkLoss
    chunk_rows: int
    dtype: torch.dtype  # of the products
    in_forward: bool  # gradients are formed in the forward pass
    sequence_parallel: bool
    fuse: bool  # the weight's gradient is added to the host's main_grad


def fused_loss(
    hidden_states: torch.Tensor,
    output_weight: torch.Tensor,
    bias: torch.Tensor | None,
    loss: ChunkLoss,
    *,
    shape: tuple[int, int],
    chunk_size: ChunkSize,
    gradient: GradientMode,
    token_weights: torch.Tensor | None,
    sequence_parallel: bool,
    gradient_accumulation_fusion: bool,
    memory_budget_bytes: int | None,
) -> tuple[torch.Tensor | None, ...]:
    """Loss and metrics [s * b], flat, of a loss over the chunks of hidden_states [s, b, h].

    output_weight is [vp, h], bias [vp] or None, token_weights [s, b] or None, shape the leading
    (s, b) of the whole sequence; the rest as for `fused_chunked_kd_loss`.
    """
    dtype = compute_dtype(hidden_states, output_weight)
    wanted = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden_states, output_weight, bias)
    )
    positions = loss.positions
    mode = gradient_mode(gradient, token_weights, dtype, shape)
    plan = FusedPlan(
        loss=loss,
        chunk_rows=chunk_rows(
            chunk_size,
            rows=positions.rows,
            batch=shape[1],
            # Padding included, as all ranks must make the same number of chunks.
            width=loss.shard.rows * loss.tensors_per_chunk,
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
    """The leading shape [s, b] of the whole sequence, or a ValueError."""
    if hidden_states.dim() != 3 or output_weight.dim() != 2:
        raise ValueError(
            "fused losses want hidden_states [s, b, h] and output_weight [v/tp, h]; got "
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
    """recompute or in_forward, or a ValueError; shape: the leading [s, b]."""
    if gradient not in GRADIENT_MODES:
        raise ValueError(f"gradient must be one of {', '.join(GRADIENT_MODES)}; got {gradient!r}")
    if token_weights is not None and tuple(token_weights.shape) != tuple(shape):
        raise ValueError(
            f"token_weights want [s, b] = {list(shape)}, got {list(token_weights.shape)}"
        )
    if gradient == "auto":
        usable = token_weights is not None and dtype != torch.float16
        return "in_forward" if usable else "recompute"
    if gradient == "in_forward" and token_weights is None:
        raise ValueError(
            "gradient in_forward needs token_weights [s, b] (the loss mask) in the forward pass; "
            "without them use gradient recompute"
        )
    if gradient == "in_forward" and dtype == torch.float16:
        raise ValueError(
            "gradient in_forward stores gradients before fp16 loss scaling, where they underflow: "
            "use bf16, or gradient recompute"
        )
    return gradient


class Projection:
    """hidden @ weight.T (+ bias) for one chunk at a time, into one buffer."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        positions: Positions,
        shard: VocabShard,
        dtype: torch.dtype,
        most_rows: int,
    ) -> None:
        """hidden [s * b, h] of the whole sequence, weight [vp, h], bias [vp] or None."""
        self.hidden, self.positions, self.dtype = hidden, positions, dtype
        columns = shard.unpadded_rows
        self.weight = weight[:columns].to(dtype)  # [vp, h], without padding rows
        self.bias = None if bias is None else bias[:columns].to(dtype)
        width = columns + row_gap(columns, dtype, hidden.device)
        buffer = hidden.new_empty(min(most_rows, positions.rows), width, dtype=dtype)
        self.buffer = buffer[:, :columns]

    def __call__(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunk's hidden states [n, h], and its logits [n, vp], which lie in the buffer."""
        h = self.positions.take(self.hidden, part).to(self.dtype)
        out = self.buffer[: h.shape[0]]
        if self.bias is None:
            return h, torch.mm(h, self.weight.T, out=out)
        return h, torch.addmm(self.bias, h, self.weight.T, out=out)


def row_gap(columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Unused elements after each row of a chunk's logits.

    On an accelerator every row begins where 16 bytes can be read at once, and where a product finds
    the leading dimension that it wants: an odd vocabulary would be read element by element.

    On a CPU rows a multiple of the page size apart compete for the same few cache lines, which
    costs the products up to a quarter of their time. 16-bit products have kernels of their own.
    """
    if device.type != "cpu":
        return -columns % DEVICE_ROW_ELEMENTS
    collide = columns * dtype.itemsize % ALIASING_BYTES == 0
    wide = dtype in (torch.float32, torch.float64)
    return ROW_GAP_BYTES // dtype.itemsize if wide and collide else 0


def _projection(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: FusedPlan
) -> Projection:
    shard = plan.loss.shard
    full = gather_sequence(hidden, shard.group) if plan.sequence_parallel else hidden
    return Projection(
        full.flatten(0, 1), weight, bias, plan.loss.positions, shard, plan.dtype, plan.chunk_rows
    )


def _gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: FusedPlan,
    needs: tuple[bool, ...],
    project: Projection,
    into_main_grad: bool,
) -> Gradients:
    gathered = project.hidden if plan.sequence_parallel else None
    if gathered is not None and gathered.dtype != plan.dtype:
        gathered = None  # under autocast
    return Gradients(
        hidden,
        weight,
        bias,
        plan.loss.positions,
        plan.loss.shard,
        plan.dtype,
        needs,
        sequence_parallel=plan.sequence_parallel,
        fuse=plan.fuse,
        into_main_grad=into_main_grad,
        gathered=gathered,
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
        loss, positions = plan.loss, plan.loss.positions
        like = hidden.new_empty(0, dtype=accumulation_dtype(plan.dtype))
        outputs = LossOutputs.zeros(positions, like, loss.divergence, loss.labels is not None)
        needs = ctx.needs_input_grad[:3]
        gradients = saved = None
        project = _projection(hidden, weight, bias, plan)
        if plan.in_forward:
            gradients = _gradients(hidden, weight, bias, plan, needs, project, into_main_grad=False)
        elif any(needs):
            saved = SavedReadings(positions.rows)
        loss.begin_pass(plan.chunk_rows)
        for part in positions.chunks(plan.chunk_rows):
            h, z = project(part)
            chunk = loss.open(part)
            reading = chunk.read_(z, then_differentiate=gradients is not None)
            if gradients is None:
                values = chunk.evaluate(reading)
            else:
                upstream = positions.take(token_weights, part)
                values = chunk.differentiate_(z, reading, upstream)
                gradients.add_(part, z, h, project.weight)
            outputs.put_(positions, part, *values)
            if saved is not None:
                saved.put_(part, reading)
        loss.end_pass()
        project = h = z = chunk = reading = None  # dH is reduced beside none of them
        ctx.plan = plan
        if gradients is not None:
            ctx.gradients = gradients.reduced(hidden.shape)
            ctx.save_for_backward(token_weights)
        elif saved is not None:
            ctx.weight = weight  # the parameter itself: main_grad is its attribute
            ctx.save_for_backward(hidden, weight, bias, *saved.tensors)
        return outputs.leave(ctx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(upstream.device.type, enabled=False):
            backward = _scale if ctx.plan.in_forward else _recompute
            return *backward(ctx, upstream), None, None


def _recompute(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    plan, loss, positions = ctx.plan, ctx.plan.loss, ctx.plan.loss.positions
    hidden, weight, bias, *saved = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    project = _projection(hidden, weight, bias, plan)
    gradients = _gradients(hidden, ctx.weight, bias, plan, needs, project, into_main_grad=True)
    loss.begin_pass(plan.chunk_rows)
    for part in positions.chunks(plan.chunk_rows):
        h, z = project(part)
        chunk, reading = loss.open(part), loss.Reading(*(x[part] for x in saved))
        chunk.cut_again_(z)
        chunk.differentiate_(z, reading, positions.take(upstream, part))
        gradients.add_(part, z, h, project.weight)
    loss.end_pass()
    project = h = z = chunk = reading = None  # dH is reduced beside none of them
    return gradients.reduced(hidden.shape).for_autograd(None)


def _scale(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Multiply the gradients of the forward pass by the upstream scalar, in place."""
    if ctx.gradients is None:
        raise RuntimeError(
            "second backward pass through a loss of gradient in_forward, which gave its stored "
            "gradients away in the first: use gradient recompute"
        )
    gradients, ctx.gradients = ctx.gradients, None  # or autograd would copy what it can keep
    (token_weights,) = ctx.saved_tensors
    index = ctx.plan.loss.positions.index
    if index is not None:  # what comes upstream of any other row meets no gradient
        upstream, token_weights = upstream[index], token_weights[index]
    return gradients.for_autograd(upstream_scale(upstream, token_weights))


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
