"""Losses of other packages, called as their users would; each says why it is missing.

Shapes: s sequence, v vocabulary.
"""

import importlib
import importlib.util

import torch
from torch.nn import functional

from megatron_kd.tools.benchmark.inputs import Inputs


def dense_target(inputs: Inputs):
    """The target as the whole [s, v] these functions want: forming it is part of their cost."""
    target = inputs.target
    p = torch.zeros(inputs.seq_tokens, inputs.vocab, device=inputs.device)
    return p.scatter_(-1, target.ids.squeeze(1), target.logprobs.squeeze(1).float().exp())


def plain_kl_div(inputs: Inputs):
    logits = functional.linear(inputs.hidden.squeeze(1), inputs.weight)
    log_q = functional.log_softmax(logits.float(), -1)
    return functional.kl_div(log_q, dense_target(inputs), reduction="none").sum(-1).mean()


def torch_missing(device: torch.device) -> str | None:
    if hasattr(functional, "linear_cross_entropy"):
        return None
    return f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has)"


def torch_dense_targets(inputs: Inputs):
    """Cross-entropy to the target, and the target's own entropy to make it a divergence.

    Probability targets take torch's unchunked path.
    """
    hidden, logprobs = inputs.hidden.squeeze(1), inputs.target.logprobs.float()
    target = dense_target(inputs).to(hidden.dtype)
    loss = functional.linear_cross_entropy(hidden, inputs.weight, target)
    return loss + (logprobs.exp() * logprobs).sum(-1).mean()


def torch_hard_labels(inputs: Inputs):
    """Cross-entropy to the labels, in chunks whose size torch chooses."""
    return functional.linear_cross_entropy(
        inputs.hidden.squeeze(1),
        inputs.weight,
        inputs.labels.squeeze(1),
        options=torch.nn.LinearCrossEntropyOptions(),
    )


def modelopt_missing(device: torch.device) -> str | None:
    found = _not_installed("modelopt", "nvidia-modelopt") or _not_installed(
        "megatron", "megatron-core"
    )
    if found:
        return found
    try:
        importlib.import_module("megatron_kd.host.online.modelopt_peer")
    except ImportError as error:
        return f"nvidia-modelopt's plugin for Megatron: {error}"
    return None


def modelopt_logits_kl(logits, teacher_logits, group):
    from megatron_kd.host.online.modelopt_peer import mean_logits_kl

    return mean_logits_kl(logits, teacher_logits, group)


def megatron_lm_missing(device: torch.device) -> str | None:
    found = _not_installed("megatron", "megatron-core")
    if found:
        return found
    from megatron_kd.host import megatron_lm_peer

    return megatron_lm_peer.missing()


def megatron_lm_cached(logits, inputs: Inputs):
    from megatron_kd.host import megatron_lm_peer

    return megatron_lm_peer.mean_topk_kl(logits, inputs.target.ids, inputs.target.logprobs)


def veomni_missing(device: torch.device) -> str | None:
    return _not_installed("veomni", "veomni")


def veomni_chunked_topk(inputs: Inputs):
    """VeOmni's chunked top-K loss. It sums dW in the weight's dtype."""
    from veomni.ops.kernels.cross_entropy.chunk_topk_distill import chunk_topk_distill_function

    _, _, loss, *_ = chunk_topk_distill_function(
        inputs.hidden.transpose(0, 1),
        inputs.weight,
        inputs.labels.T,
        inputs.target.ids.transpose(0, 1),
        inputs.target.logprobs.transpose(0, 1),
        chunk_size=inputs.chunk_tokens,
        shift_labels=inputs.labels.T,
    )
    return loss.mean()


def liger_missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "Liger's kernels are Triton: CUDA only"
    return _not_installed("liger_kernel", "liger-kernel")


def liger_fused_jsd(inputs: Inputs):
    """Liger's fused JSD with beta 0, which is forward KL.

    Liger picks its own chunk size and sums dW in the weight's dtype.
    """
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    return LigerFusedLinearJSD(jsd_beta=0.0)(
        inputs.hidden.squeeze(1),
        inputs.weight,
        inputs.teacher_hidden.squeeze(1),
        inputs.teacher_weight,
        None,
    )


def _not_installed(module: str, package: str) -> str | None:
    found = importlib.util.find_spec(module) is not None
    return None if found else f"{package} is not installed"
