"""ModelOpt's own logits loss, for the benchmark."""

import functools
import warnings

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about optional packages that are not there
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from modelopt.torch.distill.plugins.megatron import LogitsKLLoss


def mean_logits_kl(logits, teacher_logits, group):
    """Mean forward KL in nats from logits [s, 1, vp] and teacher_logits [s, 1, vp].

    s: positions, vp: this rank's part of the vocabulary. Under tensor parallelism each rank's loss
    is its shard's part: the value is summed over group, as ModelOpt's own loss balancer does it.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    loss, *_ = _criterion(ranks)(logits, teacher_logits)
    if group is not None:
        whole = loss.detach().clone()
        dist.all_reduce(whole, group=group)
        loss = loss + (whole - loss.detach())
    return loss.mean()


@functools.cache
def _criterion(ranks: int) -> torch.nn.Module:
    if ranks > 1 and not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    return LogitsKLLoss(
        TransformerConfig(
            num_layers=1,
            hidden_size=ranks,
            num_attention_heads=ranks,
            tensor_model_parallel_size=ranks,
        )
    )
