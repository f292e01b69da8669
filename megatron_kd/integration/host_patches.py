"""Every change to the host's own code that is active on GPUs too, each with its reason and the
version it is for.

The host offers no hook for these. What only a CPU needs is in `cpu_backend`.
"""

import importlib.util
import logging

import megatron.bridge.data.loaders as bridge_loaders
import megatron.bridge.training.initialize as bridge_initialize

from megatron_kd.integration.stop_signals import LoaderWorkerSignals

logger = logging.getLogger(__name__)

COMPILED_HELPERS = "megatron.core.datasets.helpers_cpp"


def apply() -> None:
    """Apply every patch; calling it again does nothing."""
    _skip_needless_compilation()
    _let_loader_workers_end()


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
