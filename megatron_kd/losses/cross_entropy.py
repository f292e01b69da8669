"""Hard-label cross-entropy from hidden states: the fused head with the label as the whole support.

With K = 1, p = 1 at the label and no tail, forward KL is log Z - z_y, so this is a target and no
code of its own.
"""

from typing import Any

import torch

from megatron_kd.losses.fused_chunked import fused_chunked_kd_loss
from megatron_kd.losses.target import LossResult, TopKTarget


def fused_cross_entropy(
    hidden_states: torch.Tensor, output_weight: torch.Tensor, labels: torch.Tensor, **options: Any
) -> LossResult:
    """Per-token cross-entropy to hard labels, in nats, without logits.

    Args:
        hidden_states: [S, B, D], as for `fused_chunked_kd_loss`.
        output_weight: [Vp, D], as for `fused_chunked_kd_loss`.
        labels: [S, B] int32 or int64 global ids; negative ones are ignored: loss 0, no gradient.
        options: bias, chunk_size, gradient, token_weights, supervised_index, sequence_parallel,
            gradient_accumulation_fusion, memory_budget_bytes, vocab_size and tp_group of
            `fused_chunked_kd_loss`.

    Returns:
        [S, B] fp32, nats, unmasked, identical on all ranks of tp_group (do not reduce again).

    Raises:
        ValueError: As for `fused_chunked_kd_loss`, or an option that cross-entropy does not have.
    """
    foreign = set(options) - OPTIONS
    if foreign:
        raise ValueError(
            f"fused_cross_entropy takes no {', '.join(sorted(foreign))}; it takes "
            f"{', '.join(sorted(OPTIONS))}"
        )
    if labels.dim() != 2:
        raise ValueError(f"labels want [S, B], got {list(labels.shape)}")
    used = labels >= 0
    logprobs = torch.where(used, 0.0, float("-inf")).unsqueeze(-1)
    target = TopKTarget(torch.where(used, labels, -1).unsqueeze(-1), logprobs)
    return fused_chunked_kd_loss(hidden_states, output_weight, target, **options)


OPTIONS = frozenset(
    (
        "bias",
        "chunk_size",
        "gradient",
        "token_weights",
        "supervised_index",
        "sequence_parallel",
        "gradient_accumulation_fusion",
        "memory_budget_bytes",
        "vocab_size",
        "tp_group",
    )
)
