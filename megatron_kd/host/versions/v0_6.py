"""Megatron-Bridge 0.6 with Megatron-Core 0.19."""

from megatron_kd.host.versions import every_version
from megatron_kd.host.versions.description import Host


def batch_on_this_cp_rank(batch: dict, cp_group) -> dict:
    """Core asks whether context parallelism is hybrid; ours is not."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)


def convert_to_distillation(student, teacher, kd_config, attach):
    """The host converts in a hook of its own, which ours must follow."""
    from megatron.bridge.models.distillation_provider import convert_to_distillation_provider

    converted = convert_to_distillation_provider(student, teacher, kd_config)
    converted.register_pre_wrap_hook(attach)
    return converted


def leave_the_order_to_the_dataset() -> None:
    """With `dataloader_type` batch the sampler shuffles too, also for evaluation, what the dataset
    has already put in an order that every loader sees alike.
    """
    import megatron.bridge.data.samplers as samplers

    class InOrder(samplers.MegatronPretrainingBatchSampler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, shuffle=False)

    samplers.MegatronPretrainingBatchSampler = InOrder


def count_accepted_tokens_of_logits_alone() -> None:
    """Core counts the tokens that a head for multi-token prediction gets right, for its log, in
    what the output layer returned. With a fused loss these are hidden states: the rate would be
    nonsense, and under sequence parallelism the shapes do not fit. None are counted then.
    """
    import megatron.core.transformer.multi_token_prediction as prediction_heads
    import torch

    from megatron_kd.host.output_layer import hands_input_through

    count = prediction_heads._compute_mtp_acceptance_counts

    def count_of_logits(mtp_logits, mtp_labels, loss_mask, output_layer, *args, **kwargs):
        if hands_input_through(output_layer):
            none = torch.zeros((), device=loss_mask.device)
            return none, none
        return count(mtp_logits, mtp_labels, loss_mask, output_layer, *args, **kwargs)

    prediction_heads._compute_mtp_acceptance_counts = count_of_logits


def count_predicted_tokens_of_whole_sequences() -> None:
    """With per-token loss, core weighs the loss of a head for multi-token prediction by supervised
    tokens over those still supervised once the mask is shifted. Under context parallelism it
    counts both on this rank alone, where a token that moves to the neighbor is missed: the ranks
    weigh alike tokens differently, and a rank without a token of its own drops its neighbor's.
    Here both are counted over the ranks that share a sequence, as without context parallelism.
    """
    import copy

    import megatron.core.models.gpt.gpt_model as gpt_model
    import megatron.core.models.hybrid.hybrid_model as hybrid_model
    import megatron.core.transformer.multi_token_prediction as prediction_heads
    import torch

    def over_ranks(count, group):
        count = count.detach().clone()
        torch.distributed.all_reduce(count, group=group)
        return count

    roll = prediction_heads.roll_tensor

    def roll_and_count(tensor, shifts=-1, dims=-1, cp_group=None, packed_seq_params=None):
        rolled, count = roll(tensor, shifts, dims, cp_group, packed_seq_params)
        is_mask = tensor is not None and tensor.is_floating_point() and tensor.dim() == 2
        if is_mask and cp_group is not None and cp_group.size() > 1:
            count = over_ranks(count, cp_group)
        return rolled, count

    log = prediction_heads.MTPLossLoggingHelper.save_metrics_to_tracker

    def log_of_whole_sequences(loss, *args, **kwargs):
        """A rank's sum over all ranks' count is a part, and the host averages over the ranks."""
        from megatron.core import parallel_state

        log(loss * parallel_state.get_context_parallel_world_size(), *args, **kwargs)

    process = prediction_heads.process_mtp_loss

    def process_whole_sequences(*args, config, loss_mask, cp_group=None, **kwargs):
        split = cp_group is not None and cp_group.size() > 1
        if split and config.calculate_per_token_loss:
            # The branch for a mean, which divides by the shifted count, times the first count.
            config = copy.copy(config)
            config.calculate_per_token_loss = False
            factor = config.mtp_loss_scaling_factor
            config.mtp_loss_scaling_factor = factor * over_ranks(loss_mask.sum(), cp_group)
        return process(*args, config=config, loss_mask=loss_mask, cp_group=cp_group, **kwargs)

    prediction_heads.roll_tensor = roll_and_count
    prediction_heads.MTPLossLoggingHelper.save_metrics_to_tracker = log_of_whole_sequences
    gpt_model.process_mtp_loss = hybrid_model.process_mtp_loss = process_whole_sequences


def add_override_to_typing() -> None:
    """All that this host misses on Python 3.11, although it declares 3.12."""
    import typing

    if not hasattr(typing, "override"):
        from typing_extensions import override

        typing.override = override


HOST = Host(
    bridge="0.6.2",
    core="0.19.2",
    batch_on_this_cp_rank=batch_on_this_cp_rank,
    convert_to_distillation=convert_to_distillation,
    evaluates_online_pipelines=True,
    shares_data_iterators=True,
    gemma3_window_counts_query=True,
    patches=(
        *every_version.PATCHES,
        leave_the_order_to_the_dataset,
        count_accepted_tokens_of_logits_alone,
        count_predicted_tokens_of_whole_sequences,
    ),
    cpu_stand_ins={
        # Annotations, isinstance checks and base classes only.
        "transformer_engine": (
            "megatron.bridge.peft.lora_layers",
            "megatron.bridge.models.gpt_full_te_layer_autocast_spec",
        ),
        # Decorators of kernels that are never launched on a CPU.
        "triton": ("megatron.core.transformer.moe.ops.paged_stash",),
        # An annotation in the wrapper for restarts inside the process.
        "nvidia_resiliency_ext": (
            "megatron.bridge.training.pretrain",
            "megatron.bridge.training.inprocess_restart",
        ),
    },
    prepare_python=add_override_to_typing,
)
