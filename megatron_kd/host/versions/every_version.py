"""Changes that every version of the host tested so far needs, on GPUs too."""

import importlib
import importlib.util
import logging

logger = logging.getLogger(__name__)

COMPILED_HELPERS = "megatron.core.datasets.helpers_cpp"
FUSION_KERNEL = "fused_weight_gradient_mlp_cuda"
"""APEX's module, without which the host's output layer refuses gradient accumulation fusion."""


def skip_needless_compilation() -> None:
    """megatron-core from pip: `compile_helpers` runs `make` and exits with code 1.

    The wheel ships the compiled index helper but no Makefile, so a pip-only installation cannot
    start. Where the helper can be found there is nothing to compile; in a source tree without it
    the host's own function stays.
    """
    import megatron.bridge.training.initialize as initialize

    if importlib.util.find_spec(COMPILED_HELPERS) is None:
        return
    if hasattr(initialize, "compile_helpers"):
        initialize.compile_helpers = _helpers_are_compiled


def has_fusion_kernel() -> bool:
    """Whether gradients can be summed inside the products that form them. Bridge 0.6 takes
    Transformer Engine alone for enough, but Core's output layer asks for APEX.
    """
    return importlib.util.find_spec(FUSION_KERNEL) is not None


def compiled_helpers_fault() -> str | None:
    """Why the compiled index helper of megatron-core cannot be used; None where it can."""
    try:
        importlib.import_module(COMPILED_HELPERS)
    except ImportError as error:
        return str(error)
    return None


def _helpers_are_compiled() -> None:
    logger.debug("%s is already compiled", COMPILED_HELPERS)


def let_loader_workers_end() -> None:
    """megatron-bridge: with `exit_signal_handler_for_dataloader` a worker can never be ended by the
    signal, and a failing rank waits for its workers for ever.
    """
    import megatron.bridge.data.loaders as loaders

    from megatron_kd.host.loader_signals import LoaderWorkerSignals

    if hasattr(loaders, "DistributedSignalHandler"):
        loaders.DistributedSignalHandler = LoaderWorkerSignals


def notice_absent_layers() -> None:
    """megatron-bridge's adapters: without Transformer Engine its layers are None in Core, which the
    adapters take for classes.
    """
    from megatron.bridge.peft import utils

    if None in utils.TECL:
        utils.HAVE_TE = False


def give_sgd_a_state_to_load_into() -> None:
    """megatron-core gives SGD no function that makes its state, and calls it all the same where a
    checkpoint is loaded: a run with it could be saved, and never resumed.
    """
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    initialize = MegatronOptimizer.__init__

    def with_state(self, optimizer, config, init_state_fn=None):
        initialize(self, optimizer, config, init_state_fn or _zero_momentum)

    MegatronOptimizer.__init__ = with_state


def _zero_momentum(optimizer, config=None) -> None:
    """What SGD's first step makes of no momentum is what it makes of a momentum of zero."""
    for group in optimizer.param_groups if optimizer is not None else ():
        if group.get("momentum"):
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = parameter.data.new_zeros(parameter.shape)


PATCHES = (
    skip_needless_compilation,
    let_loader_workers_end,
    notice_absent_layers,
    give_sgd_a_state_to_load_into,
)
