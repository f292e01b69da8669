"""Every change to the host's own code that is active on GPUs too, each with its reason and the
version it is for.

The host offers no hook for these. What only a CPU needs is in `cpu_backend`.
"""

import copy
import importlib.util
import inspect
import logging

import megatron.bridge.data.loaders as bridge_loaders
import megatron.bridge.data.samplers as samplers
import megatron.bridge.models.conversion.model_bridge as model_bridge
import megatron.bridge.training.initialize as bridge_initialize
import megatron.core.transformer.moe.router as router
import megatron.core.transformer.multi_token_prediction as prediction_heads
import torch
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from megatron.core import parallel_state

from megatron_kd.host.loader_signals import LoaderWorkerSignals
from megatron_kd.host.output_layer import hands_input_through

logger = logging.getLogger(__name__)

COMPILED_HELPERS = "megatron.core.datasets.helpers_cpp"
LOCAL_EXPERTS = ".mlp.experts.local_experts."


def apply() -> None:
    """Apply every patch; calling it again does nothing."""
    _number_local_experts()
    _scale_router_losses_by_whole_sequences()
    _count_accepted_tokens_of_logits_alone()
    _skip_needless_compilation()
    _let_loader_workers_end()
    _leave_the_order_to_the_dataset()


def _skip_needless_compilation() -> None:
    """megatron-core 0.16 – 0.19 from pip: `compile_helpers` runs `make` and exits with code 1.

    The wheel ships the compiled index helper but no Makefile, so a pip-only installation cannot
    start. Where the helper can be found there is nothing to compile; in a source tree without it
    the host's own function stays.
    """
    if importlib.util.find_spec(COMPILED_HELPERS) is None:
        return
    if hasattr(bridge_initialize, "compile_helpers"):
        bridge_initialize.compile_helpers = _helpers_are_compiled


def _helpers_are_compiled() -> None:
    logger.debug("%s is already compiled", COMPILED_HELPERS)


def _let_loader_workers_end() -> None:
    """megatron-bridge 0.3 – 0.6: with `exit_signal_handler_for_dataloader` a worker can never be
    ended by the signal, and a failing rank waits for its workers for ever.
    """
    if hasattr(bridge_loaders, "DistributedSignalHandler"):
        bridge_loaders.DistributedSignalHandler = LoaderWorkerSignals


def _leave_the_order_to_the_dataset() -> None:
    """megatron-bridge 0.6: with `dataloader_type` batch the sampler shuffles too, also for
    evaluation, what the dataset has already put in an order that every loader sees alike.
    """
    sampler = samplers.MegatronPretrainingBatchSampler
    if "shuffle" not in inspect.signature(sampler.__init__).parameters:
        return

    class InOrder(sampler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs, shuffle=False)

    samplers.MegatronPretrainingBatchSampler = InOrder


def _number_local_experts() -> None:
    """megatron-bridge 0.3, experts that are modules of their own (`moe_grouped_gemm` false): their
    local numbers are taken for global ones, so every expert-parallel rank loads the first experts,
    with no error, and the export cannot find them.
    """
    to_global = model_bridge._megatron_local_name_to_global
    if "local_experts" in inspect.getsource(to_global):
        return

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


def _scale_router_losses_by_whole_sequences() -> None:
    """megatron-core 0.16: with per-token loss, a router's auxiliary and z losses are multiplied by
    the positions of this rank, but divided by those of whole sequences: under sequence and context
    parallelism they are too small by the number of ranks that share a sequence. Newer cores do what
    this does.
    """
    attach = router.TopKRouter.attach_and_log_load_balancing_loss
    if "tp_cp_group.size()" in inspect.getsource(attach):
        return
    original = router.MoEAuxLossAutoScaler

    class WholeSequences:
        @staticmethod
        def apply(activation, loss):
            ranks = parallel_state.get_tensor_and_context_parallel_group().size()
            return original.apply(activation, loss * ranks)

    if original.__name__ != WholeSequences.__name__:
        router.MoEAuxLossAutoScaler = WholeSequences


def _count_accepted_tokens_of_logits_alone() -> None:
    """megatron-core 0.19 counts the tokens that a head for multi-token prediction gets right, for
    its log, in what the output layer returned. With a fused loss these are hidden states: the rate
    would be nonsense, and under sequence parallelism the shapes do not fit. None are counted then.
    """
    count = getattr(prediction_heads, "_compute_mtp_acceptance_counts", None)
    if count is None or hasattr(count, "of_logits_alone"):
        return

    def count_of_logits(mtp_logits, mtp_labels, loss_mask, output_layer, *args, **kwargs):
        if hands_input_through(output_layer):
            none = torch.zeros((), device=loss_mask.device)
            return none, none
        return count(mtp_logits, mtp_labels, loss_mask, output_layer, *args, **kwargs)

    count_of_logits.of_logits_alone = True
    prediction_heads._compute_mtp_acceptance_counts = count_of_logits
