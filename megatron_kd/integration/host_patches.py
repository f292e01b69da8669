"""Every change to the host's own code that is active on GPUs too, each with its reason and the
version it is for.

The host offers no hook for these. What only a CPU needs is in `cpu_backend`.
"""

import importlib.util
import logging

import megatron.bridge.training.initialize as bridge_initialize

logger = logging.getLogger(__name__)

COMPILED_HELPERS = "megatron.core.datasets.helpers_cpp"


def apply() -> None:
    """Apply every patch; calling it again does nothing."""
    _skip_needless_compilation()


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
