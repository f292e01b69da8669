"""Full-vocabulary distillation with the teacher at hand; neither model's [s, b, v] logits exist.

The loop of `fused_loop` with two projections per chunk, the student's and the teacher's: student
products as listed there, and one (in_forward) or two (recompute) of the teacher's.

s sequence, b micro-batch, h and ht hidden sizes of student and teacher, vp = v/tp this rank's
vocabulary.
"""

import torch
import torch.distributed as dist

from megatron_kd.losses.chunking import ChunkSize
from megatron_kd.losses.dense import DenseLoss, check_logits
from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.full_loss import FullLoss
from megatron_kd.losses.fused_loop import (
    GradientMode,
    Projection,
    check_hidden,
    compute_dtype,
    fused_loss,
)
from megatron_kd.losses.logit_transform import LogitTransform
from megatron_kd.losses.positions import Positions, loss_result
from megatron_kd.losses.target import LossResult
from megatron_kd.losses.topk_loss import check_positions
from megatron_kd.losses.vocab_parallel import VocabShard, gather_sequence


def fused_online_kd_loss(
    hidden_states: torch.Tensor,
    output_weight: torch.Tensor,
    teacher_hidden_states: torch.Tensor,
    teacher_output_weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    chunk_size: ChunkSize = "auto",
    gradient: GradientMode = "recompute",
    token_weights: torch.Tensor | None = None,
    supervised_index: torch.Tensor | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
    memory_budget_bytes: int | None = None,
    divergence: Divergence = Divergence(),
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    return_metrics: bool = False,
) -> LossResult:
    """Per-token divergence from the whole teacher distribution to the student, in nats.

    Args:
        hidden_states, output_weight, bias: The student's, as for `fused_chunked_kd_loss`.
        teacher_hidden_states: [s, b, ht], or [s/tp, b, ht] with sequence_parallel. No gradient.
        teacher_output_weight: [vp, ht], the same rows of the vocabulary as output_weight.
        teacher_bias: [vp] or None.
        chunk_size: Sequence positions per chunk, or "auto". Transient memory is a chunk of both
            models' logits.
        divergence: Its tail may have any value: nothing lies off a support that is the whole
            vocabulary, so all are one. Its objective needs a form over a full vocabulary.
        vocab_size: Rows at or beyond it are padding in both weights: no mass, no gradient. Needed
            where the two are padded differently (without TP).
        teacher_logit_softcap, teacher_logit_scale: The teacher's, as logit_softcap and logit_scale
            are the student's.
        The rest: as for `fused_chunked_kd_loss`.

    Returns:
        [s, b] fp32, nats, unmasked, identical on all ranks of tp_group (do not reduce again); with
        return_metrics a pair of it and `KDMetrics` (both masses are 1).

    Raises:
        ValueError: As for `fused_chunked_kd_loss`; or the two vocabularies are sharded or padded so
            that their rows do not correspond.
    """
    shape = check_hidden(hidden_states, output_weight, bias, sequence_parallel, tp_group)
    teacher_shape = check_hidden(
        teacher_hidden_states, teacher_output_weight, teacher_bias, sequence_parallel, tp_group
    )
    check_positions("teacher_hidden_states", teacher_shape, shape)
    shard = VocabShard.of(output_weight.shape[0], vocab_size, tp_group)
    check_same_vocabulary(output_weight.shape[0], teacher_output_weight.shape[0], vocab_size, shard)
    teacher = _TeacherProjection(
        teacher_hidden_states.detach(),
        teacher_output_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
        shard,
        compute_dtype(teacher_hidden_states, teacher_output_weight),
        sequence_parallel and shard.group is not None,
    )
    transforms = (
        LogitTransform.of(logit_scale, logit_softcap),
        LogitTransform.of(teacher_logit_scale, teacher_logit_softcap),
    )
    loss = FullLoss.of(divergence, shard, labels, shape, teacher, supervised_index, transforms)
    outputs = fused_loss(
        hidden_states,
        output_weight,
        bias,
        loss,
        shape=shape,
        chunk_size=chunk_size,
        gradient=gradient,
        token_weights=token_weights,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        memory_budget_bytes=memory_budget_bytes,
    )
    return loss_result(outputs, shape, return_metrics)


def dense_online_kd_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    divergence: Divergence = Divergence(),
    labels: torch.Tensor | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    return_metrics: bool = False,
) -> LossResult:
    """Per-token divergence from the whole teacher distribution, in nats, from whole logits.

    Args:
        logits: [s, b, vp], fp32, bf16, fp16 or fp64. Not changed: one fp32 copy is made, which
            becomes the gradient.
        teacher_logits: [s, b, vp], of the same vocabulary and sharding. Not changed; no gradient.
        logit_softcap, logit_scale and the teacher's: None and 1 for logits that were capped and
            scaled already, see `dense_kd_loss`.
        The rest: as for `fused_online_kd_loss`.

    Returns:
        [s, b] fp32, as for `fused_online_kd_loss`.

    Raises:
        ValueError: As for `fused_online_kd_loss`.
    """
    shape, rows = check_logits(logits)
    teacher_shape, teacher_rows = check_logits(teacher_logits)
    check_positions("teacher_logits", teacher_shape, shape)
    shard = VocabShard.of(rows, vocab_size, tp_group)
    check_same_vocabulary(rows, teacher_rows, vocab_size, shard)
    teacher = _TeacherLogits(teacher_logits.detach().flatten(0, 1)[:, : shard.unpadded_rows])
    transforms = (
        LogitTransform.of(logit_scale, logit_softcap),
        LogitTransform.of(teacher_logit_scale, teacher_logit_softcap),
    )
    loss = FullLoss.of(divergence, shard, labels, shape, teacher, transforms=transforms)
    return loss_result(DenseLoss.apply(logits.flatten(0, 1), loss), shape, return_metrics)


def check_same_vocabulary(
    rows: int, teacher_rows: int, vocab_size: int | None, shard: VocabShard
) -> None:
    """Refuse output layers whose `rows` and `teacher_rows` are not of the same tokens."""
    if rows == teacher_rows:
        return
    if shard.group is not None:
        raise ValueError(
            f"each rank holds {rows} rows of the student's vocabulary and {teacher_rows} of the "
            "teacher's, so their shards are of different tokens: pad both to one size "
            "(make_vocab_size_divisible_by)"
        )
    if vocab_size is None or vocab_size > teacher_rows:
        raise ValueError(
            f"the student's vocabulary has {rows} rows, the teacher's {teacher_rows}: if the rest "
            "is padding give the number of tokens both share as vocab_size; otherwise the models "
            "do not match"
        )


class _TeacherProjection:
    """The teacher's logits of a chunk, projected from its hidden states."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shard: VocabShard,
        dtype: torch.dtype,
        sequence_parallel: bool,
    ) -> None:
        self.inputs = hidden, weight, bias
        self.shard, self.dtype, self.sequence_parallel = shard, dtype, sequence_parallel
        self.project = None

    def begin_pass(self, positions: Positions, chunk_rows: int) -> None:
        hidden, weight, bias = self.inputs
        full = gather_sequence(hidden, self.shard.group) if self.sequence_parallel else hidden
        self.project = Projection(
            full.flatten(0, 1), weight, bias, positions, self.shard, self.dtype, chunk_rows
        )

    def end_pass(self) -> None:
        self.project = None

    def __call__(self, chunk: slice) -> torch.Tensor:
        return self.project(chunk)[1]


class _TeacherLogits:
    """The teacher's logits of a chunk, out of whole ones."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits  # [s * b, vp], without padding columns

    def begin_pass(self, positions: Positions, chunk_rows: int) -> None:
        """Whole logits need no preparation."""

    def end_pass(self) -> None:
        """The caller's logits are not released here."""

    def __call__(self, chunk: slice) -> torch.Tensor:
        return self.logits[chunk]
