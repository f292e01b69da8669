"""Features of a run beside its loss: adapters, the best checkpoint, profiling, CUDA graphs."""

from megatron_kd.config import DistillConfig, SelectionConfig
from megatron_kd.typed_mapping import ConfigError

WHOLE_ITERATION = "full_iteration"


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
    _check_selection(config.selection, container)
    _check_adapters(config, container.model)
    _check_graphs(container.model)


def _check_adapters(config: DistillConfig, model) -> None:
    lora, ranks = config.student.lora, model.tensor_model_parallel_size
    if lora is not None and lora.dim % ranks:
        raise ConfigError(
            f"student.lora.dim={lora.dim} cannot be split over "
            f"bridge.model.tensor_model_parallel_size={ranks}; use a multiple of {ranks}"
        )


def _check_graphs(model) -> None:
    """A graph of a whole iteration would replay the first micro-batch's supervised positions: which
    rows the loss reads is found in host memory, anew for each.
    """
    fields = ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules")  # the last: Core 0.19
    for field in fields:
        if WHOLE_ITERATION in _names(getattr(model, field, None)):
            raise ConfigError(
                f"bridge.model.{field}={WHOLE_ITERATION} cannot record a distillation step, which "
                "finds the supervised positions of each micro-batch on the host; record layers "
                "instead (bridge.model.cuda_graph_impl=local or transformer_engine without "
                f"{WHOLE_ITERATION})"
            )


def _names(value) -> list[str]:
    """The host's names, several joined by commas, members of an enumeration, or a list of either,
    as a list.
    """
    if isinstance(value, str):
        return value.split(",")
    if isinstance(value, (list, tuple)):
        return [name for each in value for name in _names(each)]
    return [] if value is None else [value.name]


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
