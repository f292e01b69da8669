"""What differs between the host's versions, behind one name each; the rest of the integration knows
none of it.

Tested: megatron-bridge 0.3.1 with megatron-core 0.16.1, and 0.6.2 with 0.19.2. Between and beyond,
the nearest older of the two applies; `check` warns of that, and refuses a host whose seams it
cannot find.
"""

import importlib
import importlib.metadata
import inspect
import logging

TESTED = {"megatron-bridge": ("0.3.1", "0.6.2"), "megatron-core": ("0.16.1", "0.19.2")}

# What the integration replaces, calls with more than a documented signature, or reads from inside.
SEAMS = (
    "megatron.core.models.gpt.gpt_model.GPTModel.compute_language_model_loss",
    "megatron.core.tensor_parallel.layers.ColumnParallelLinear.forward",
    "megatron.core.utils.get_batch_on_this_cp_rank",
    "megatron.bridge.data.samplers.build_pretraining_data_loader",
    "megatron.bridge.training.callbacks.Callback.on_train_step_end",
    "megatron.bridge.training.config.DatasetBuildContext",
    "megatron.bridge.training.config.TrainingConfig.exit_interval",
    "megatron.bridge.training.eval.evaluate",
    "megatron.bridge.training.pretrain.pretrain",
)

logger = logging.getLogger(__name__)


def versions() -> dict[str, str]:
    """Installed versions of the packages whose internals the integration touches."""
    return {name: importlib.metadata.version(name) for name in TESTED}


def check() -> None:
    """Warn of an untested host; refuse one that lacks a seam.

    Raises:
        RuntimeError: Something the integration hooks into is not there; all of it is named.
    """
    missing = [seam for seam in SEAMS if not _exists(seam)]
    installed = ", ".join(f"{name} {version}" for name, version in versions().items())
    tested = " or ".join(" with ".join(pair) for pair in zip(*_named_versions(), strict=True))
    if missing:
        raise RuntimeError(
            f"{installed}: this host has no {', '.join(missing)}, which distillation hooks into. "
            f"Install {tested}"
        )
    if any(version not in TESTED[name] for name, version in versions().items()):
        logger.warning(
            "%s is untested here; tested: %s. Everything distillation hooks into was found, so "
            "the run goes on: compare its first losses with a tested host's",
            installed,
            tested,
        )


def batch_on_this_cp_rank(batch: dict, cp_group) -> dict:
    """This context-parallel rank's part of a batch, cut along dimension 1.

    Core 0.19 asks whether context parallelism is hybrid; ours is not.
    """
    from megatron.core.utils import get_batch_on_this_cp_rank

    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    return get_batch_on_this_cp_rank(batch, cp_group=cp_group)


def convert_to_distillation(student, teacher, kd_config, attach):
    """ModelOpt's provider of student and teacher, `attach` among its hooks, on the converted model.

    Bridge 0.3 converts while it builds, before any hook; there, a hook registered afterwards could
    end up on the teacher. Bridge 0.6 converts in a hook of its own, so ours must follow it.
    """
    from megatron.bridge.models.distillation_provider import (
        DistillationProvider,
        convert_to_distillation_provider,
    )

    converts_in_hook = hasattr(DistillationProvider, "_convert_hook")
    if not converts_in_hook:
        student.register_pre_wrap_hook(attach)
    converted = convert_to_distillation_provider(student, teacher, kd_config)
    if converts_in_hook:
        converted.register_pre_wrap_hook(attach)
    return converted


def evaluates_distillation_pipelines() -> bool:
    """Whether evaluation sizes the messages between pipeline stages for both models.

    Bridge 0.3 sizes them for the student alone, and fails.
    """
    from megatron.bridge.training import eval as host_evaluation

    return hasattr(host_evaluation, "get_tensor_shapes_adjust_fn_for_distillation")


def _named_versions() -> list[list[str]]:
    return [[f"{name} {version}" for version in tested] for name, tested in TESTED.items()]


def _exists(seam: str) -> bool:
    parts = seam.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            for name in parts[cut:]:
                found = getattr(found, name)
        except AttributeError:
            return False
        return True
    return False
