"""Megatron-Bridge 0.3 with Megatron-Core 0.16."""

from megatron_kd.host.versions import every_version
from megatron_kd.host.versions.description import Host

LOCAL_EXPERTS = ".mlp.experts.local_experts."


def batch_on_this_cp_rank(batch: dict, cp_group) -> dict:
    from megatron.core.utils import get_batch_on_this_cp_rank

    return get_batch_on_this_cp_rank(batch, cp_group=cp_group)


def convert_to_distillation(student, teacher, kd_config, attach):
    """The host converts while it builds, before any hook; a hook registered afterwards could end up
    on the teacher.
    """
    from megatron.bridge.models.distillation_provider import convert_to_distillation_provider

    student.register_pre_wrap_hook(attach)
    return convert_to_distillation_provider(student, teacher, kd_config)


def number_local_experts() -> None:
    """Experts that are modules of their own (`moe_grouped_gemm` false): their local numbers are
    taken for global ones, so every expert-parallel rank loads the first experts, with no error, and
    the export cannot find them.
    """
    import copy

    import megatron.bridge.models.conversion.model_bridge as model_bridge
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
    from megatron.core import parallel_state

    to_global = model_bridge._megatron_local_name_to_global

    def with_local_experts(models, config, param_name, vp_stage=None):
        name = to_global(models, config, param_name, vp_stage)
        group = parallel_state.get_expert_model_parallel_group()
        if group.size() == 1 or LOCAL_EXPERTS not in name:
            return name
        before, after = name.split(LOCAL_EXPERTS)
        number, rest = after.split(".", 1)
        first = config.num_moe_experts // group.size() * group.rank()
        return f"{before}{LOCAL_EXPERTS}{first + int(number)}.{rest}"

    gather = MegatronParamMapping.gather_from_ep_ranks

    def gather_local_experts(self, megatron_weights, megatron_module, hf_param_name):
        if LOCAL_EXPERTS in self.megatron_param:  # as grouped experts are named
            before, after = self.megatron_param.split(LOCAL_EXPERTS)
            number, rest = after.split(".", 1)
            self = copy.copy(self)
            self.megatron_param = f"{before}.mlp.experts.{rest}{number}"
        return gather(self, megatron_weights, megatron_module, hf_param_name)

    model_bridge._megatron_local_name_to_global = with_local_experts
    MegatronParamMapping.gather_from_ep_ranks = gather_local_experts


def scale_router_losses_by_whole_sequences() -> None:
    """With per-token loss, a router's auxiliary and z losses are multiplied by the positions of
    this rank, but divided by those of whole sequences: under sequence and context parallelism they
    are too small by the number of ranks that share a sequence. Core 0.19 does what this does.
    """
    import megatron.core.transformer.moe.router as router
    from megatron.core import parallel_state

    original = router.MoEAuxLossAutoScaler

    class WholeSequences:
        @staticmethod
        def apply(activation, loss):
            ranks = parallel_state.get_tensor_and_context_parallel_group().size()
            return original.apply(activation, loss * ranks)

    router.MoEAuxLossAutoScaler = WholeSequences


def mark_sharded_parameters(model: list) -> list:
    """Set the attributes that the skipped initialiser would have set; changes no value.

    `AutoBridge.to_megatron_provider(load_weights=True)` sets `perform_initialization=False`, and in
    Core 0.16 the initialiser is also what sets `tensor_model_parallel` on linear and embedding
    weights. Without it the shards of ranks above 0 count as duplicates: they drop out of the
    gradient norm, and clipping is wrong under tensor parallelism.
    """
    from megatron_kd.host.sharded_weights import sharded_weights

    for _, weight, dim in sharded_weights(model):
        weight.tensor_model_parallel = True
        weight.partition_dim = dim
        weight.partition_stride = getattr(weight, "partition_stride", 1)
    return model


def window_gemma2_layers(model: list) -> list:
    """Gemma 2's attention has its window in even layers, counted from 1, where transformers has it
    in odd ones, and applies it only to a mask, which training does not pass: no layer ever had one.
    Its softmax makes the mask itself when it knows the window; its fused kernel reads none.
    """
    for chunk in model:
        for module in chunk.modules():
            if type(module).__name__ != "Gemma2DotProductAttention":
                continue
            module.window_size = module.config.window_size if module.layer_number % 2 else None
            if module.window_size is not None:
                module.scale_mask_softmax.window_size = module.window_size
                module.scale_mask_softmax.scaled_masked_softmax_fusion = False
    return model


HOST = Host(
    bridge="0.3.1",
    core="0.16.1",
    batch_on_this_cp_rank=batch_on_this_cp_rank,
    convert_to_distillation=convert_to_distillation,
    evaluates_online_pipelines=False,  # sized for the student alone, it fails
    shares_data_iterators=False,
    gemma3_window_counts_query=False,
    patches=(
        *every_version.PATCHES,
        number_local_experts,
        scale_router_losses_by_whole_sequences,
    ),
    model_hooks=(mark_sharded_parameters, window_gemma2_layers),
    cpu_stand_ins={
        # Annotations, isinstance checks and base classes only.
        "transformer_engine": (
            "megatron.bridge.peft.lora",
            "megatron.bridge.peft.lora_layers",
            "megatron.bridge.models.gpt_full_te_layer_autocast_spec",
        ),
        # Decorators of inference kernels, never launched on a CPU. Modules with a guarded import
        # are not listed: some that find a "triton" go on to use more of it.
        "triton": (
            "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
            "megatron.core.inference.contexts.fused_kv_append_kernel",
            "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        ),
    },
)
