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
    patches=(
        *every_version.PATCHES,
        leave_the_order_to_the_dataset,
        count_accepted_tokens_of_logits_alone,
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
