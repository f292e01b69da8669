"""Losses from hidden states and the output weight; the [s, b, v] logits never exist.

Per chunk of positions: project, read z_S and log R, and either keep only those (gradient recompute)
or turn the chunk's logits into their gradient while they are at hand (in_forward). See
`fused_loop`.

s sequence, b micro-batch, h hidden, vp = v/tp this rank's vocabulary, k support.
"""

import torch
import torch.distributed as dist

from megatron_kd.losses.chunking import ChunkSize
from megatron_kd.losses.divergence import Divergence
from megatron_kd.losses.fused_loop import GradientMode, check_hidden, fused_loss
from megatron_kd.losses.logit_transform import LogitTransform
from megatron_kd.losses.positions import loss_result
from megatron_kd.losses.target import LossResult, TopKTarget
from megatron_kd.losses.topk_loss import TopKLoss
from megatron_kd.losses.vocab_parallel import VocabShard


def fused_chunked_kd_loss(
    hidden_states: torch.Tensor,
    output_weight: torch.Tensor,
    target: TopKTarget,
    *,
    bias: torch.Tensor | None = None,
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
    return_metrics: bool = False,
) -> LossResult:
    """Per-token divergence from a truncated teacher to the student, in nats, from hidden states.

    Args:
        hidden_states: [s, b, h], bf16, fp16, fp32 or fp64; with sequence_parallel this rank's
            [s/tp, b, h].
        output_weight: [vp, h], this rank's rows of the output layer, dtype of hidden_states (under
            autocast both are cast to its dtype).
        target: The teacher's k tokens per position of the whole [s, b], see `TopKTarget`.
        bias: [vp] or None.
        chunk_size: Sequence positions per chunk, or "auto": from memory_budget_bytes (bytes of a
            chunk's logits; None for a default) and the shapes. Transient memory is about chunk_size
            * b * vp * 4 bytes.
        gradient: recompute, in_forward (needs token_weights) or auto: in_forward where a gradient
            is wanted, token_weights are given and the dtype is not fp16; recompute otherwise.
        token_weights: [s, b] or None. The per-token factors of the sum that is differentiated, up
            to one scalar (usually the loss mask). In in_forward mode an upstream gradient that is
            no multiple of them makes the gradients NaN. The returned loss is not multiplied by
            them.
        supervised_index: int64 [n] or None: rows of the flattened [s * b] positions to project. All
            others get loss 0 and no gradient, and cost nothing. Distinct, on the device of
            hidden_states, equal on all ranks of tp_group. May be empty.
        sequence_parallel: hidden_states are sharded over tp_group along s; they are gathered here
            and their gradient is reduce-scattered.
        gradient_accumulation_fusion: Add the weight's gradient to output_weight.main_grad as
            Megatron's fused layers do, set grad_added_to_main_grad and return a dummy. A weight of
            Megatron-FSDP (it has get_main_grad()) gets its gradient through autograd instead.
        logit_softcap: c of a model whose logits are z = c · tanh(scale · x / c) of its output
            layer's product x. None: no cap.
        logit_scale: scale; without a cap z = scale · x.
        The rest: as for `dense_kd_loss`.

    Returns:
        [s, b] fp32, nats, unmasked, identical on all ranks of tp_group (do not reduce again); with
        return_metrics a pair of it and `KDMetrics`.

    Raises:
        ValueError: Shapes, dtypes or options disagree; in_forward without token_weights or in fp16
            (its loss scaling would overflow what is stored unscaled); an id outside the vocabulary.

    Source: arXiv 2608.03796, Eq. (2) and (3), for forward_kl with tail none.
    """
    shape = check_hidden(hidden_states, output_weight, bias, sequence_parallel, tp_group)
    shard = VocabShard.of(output_weight.shape[0], vocab_size, tp_group)
    transform = LogitTransform.of(logit_scale, logit_softcap)
    loss = TopKLoss.of(divergence, shard, target, labels, shape, supervised_index, transform)
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


def fused_cross_entropy(
    hidden_states: torch.Tensor,
    output_weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_size: ChunkSize = "auto",
    gradient: GradientMode = "recompute",
    token_weights: torch.Tensor | None = None,
    supervised_index: torch.Tensor | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation_fusion: bool = False,
    memory_budget_bytes: int | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """Per-token cross-entropy to hard labels, in nats, without logits.

    With k = 1, p = 1 at the label and no tail, forward KL is log Z - z_y, so this is a target for
    `fused_chunked_kd_loss` and no code of its own.

    Args:
        hidden_states: [s, b, h], as for `fused_chunked_kd_loss`.
        output_weight: [vp, h], as for `fused_chunked_kd_loss`.
        labels: [s, b] int32 or int64 global ids of the whole sequence; negative ones are ignored:
            loss 0, no gradient.
        The rest: as for `fused_chunked_kd_loss`.

    Returns:
        [s, b] fp32, nats, unmasked, identical on all ranks of tp_group (do not reduce again).

    Raises:
        ValueError: As for `fused_chunked_kd_loss`.
    """
    if labels.dim() != 2:
        raise ValueError(f"labels want [s, b], got {list(labels.shape)}")
    used = labels >= 0
    logprobs = torch.where(used, 0.0, float("-inf")).unsqueeze(-1)
    target = TopKTarget(torch.where(used, labels, -1).unsqueeze(-1), logprobs)
    return fused_chunked_kd_loss(
        hidden_states,
        output_weight,
        target,
        bias=bias,
        chunk_size=chunk_size,
        gradient=gradient,
        token_weights=token_weights,
        supervised_index=supervised_index,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        memory_budget_bytes=memory_budget_bytes,
        vocab_size=vocab_size,
        tp_group=tp_group,
        logit_softcap=logit_softcap,
        logit_scale=logit_scale,
    )
