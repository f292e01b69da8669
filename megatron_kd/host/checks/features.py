"""Features of a run beside its loss: adapters, the best checkpoint, profiling."""

from megatron_kd.config import DistillConfig, SelectionConfig
from megatron_kd.typed_mapping import ConfigError


def check_features(config: DistillConfig, container, *, on_cpu: bool) -> None:
    """Refuse a feature that this layout, machine or schedule cannot have.

    Raises:
        ConfigError: Names the settings that contradict each other, and the remedy.
    """
    if config.profile is not None and on_cpu:
        raise ConfigError(
            f"profile={config.profile} records a CUDA device and none was found; leave profile "
            "unset"
        )
    _check_output_layer(config, container.model)
    _check_selection(config.selection, container)
    _check_adapters(config, container.model)


def _check_output_layer(config: DistillConfig, model) -> None:
    """What is known of it before the model is built; `OutputLayerTap.check_is_plain` knows all."""
    cap = getattr(model, "final_logit_softcapping", None)
    if cap and config.loss.impl.startswith("fused"):
        remedy = "dense or sparse_chunked" if config.mode == "offline" else "dense"
        raise ConfigError(
            f"this student caps its logits (final_logit_softcapping={cap}), which "
            f"loss.impl={config.loss.impl} would leave out; set loss.impl={remedy}"
        )


def _check_adapters(config: DistillConfig, model) -> None:
    lora, ranks = config.student.lora, model.tensor_model_parallel_size
    if lora is not None and lora.dim % ranks:
        raise ConfigError(
            f"student.lora.dim={lora.dim} cannot be split over "
            f"bridge.model.tensor_model_parallel_size={ranks}; use a multiple of {ranks}"
        )


def _check_selection(config: SelectionConfig, container) -> None:
    if not config.keep_best:
        return
    train, checkpoint = container.train, container.checkpoint
    if not train.eval_iters:
        raise ConfigError("selection.keep_best needs evaluations: set bridge.train.eval_iters")
    if not checkpoint.save:
        raise ConfigError("selection.keep_best needs checkpoints: set bridge.checkpoint.save")
    if train.eval_interval % checkpoint.save_interval:
        raise ConfigError(
            "selection.keep_best needs a checkpoint at every evaluation: "
            f"bridge.train.eval_interval={train.eval_interval} is not a multiple of "
            f"bridge.checkpoint.save_interval={checkpoint.save_interval}"
        )
    if (checkpoint.most_recent_k or -1) > 0:
        raise ConfigError(
            "bridge.checkpoint.most_recent_k would delete the best checkpoint; unset it, or set "
            "selection.keep_best=false"
        )
