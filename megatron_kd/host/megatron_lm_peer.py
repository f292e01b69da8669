"""Megatron-LM's own loss on cached teacher rows, for the benchmark. Not every host has it."""

import warnings


def missing() -> str | None:
    """Why it cannot be measured here; None where it can."""
    try:
        _loss()
    except ImportError as error:
        return f"megatron.training.distillation (megatron-core 0.19 has it): {error}"
    return None


def mean_topk_kl(logits, ids, logprobs):
    """Mean forward KL in nats over the teacher's support, without its token for the rest.

    s: positions, v: vocabulary, k: support.

    Args:
        logits: [s, 1, v].
        ids: [s, 1, k] int64.
        logprobs: [s, 1, k] fp32.
    """
    # It subtracts in place from what `float` returns: from the caller's own logits, were they fp32.
    return _loss()(logits.clone(), logprobs, ids, 1, 0, None).mean()


def _loss():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional packages that are not there
        from megatron.training.distillation.cached_logits_loss import topk_kl_div
    return topk_kl_div
